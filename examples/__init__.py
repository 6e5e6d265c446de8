"""Scripts that users start from, and the demo of `make run`."""
