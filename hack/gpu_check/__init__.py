"""Checks of the trainer on a real GPU: `make gpu-check`."""
