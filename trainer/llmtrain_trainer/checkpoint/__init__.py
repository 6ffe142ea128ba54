"""Sharded, asynchronous checkpoints, committed by a manifest with a checksum per file."""
