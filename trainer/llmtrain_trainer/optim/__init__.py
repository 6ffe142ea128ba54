"""The optimizer and the learning rate over steps."""
