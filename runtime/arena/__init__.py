"""The memory of a CPU that weights stream into."""
