"""Checkpoints in any format as tensors by name, and their binding to the weights of a program."""
