"""The lowered forms of an exported program: its own graph, or the code that Inductor compiles from it."""
