"""Formats in which checkpoints hold quantised weights."""
