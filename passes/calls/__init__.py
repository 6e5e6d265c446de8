"""The calls of a program, and its stored form: inputs, checks, results, and the graph as JSON."""
