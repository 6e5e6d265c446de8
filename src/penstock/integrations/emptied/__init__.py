"""Modules whose weights have left memory, and what notices that one was changed."""
