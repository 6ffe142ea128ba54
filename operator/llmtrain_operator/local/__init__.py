"""Carrying plans out with processes on this machine."""
