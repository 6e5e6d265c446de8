"""Modules whose weights are not in memory: stand-ins that refuse to be read."""
