"""Models whose own Python runs, and whose weights stream: a step is the call of a module that reads parameters."""
