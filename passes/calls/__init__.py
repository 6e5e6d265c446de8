"""How a program is called, and how it is stored: inputs, checks, results, and its graph as JSON."""
