"""Checkpoints in any format, as tensors by name, and how they become the weights of a program."""
