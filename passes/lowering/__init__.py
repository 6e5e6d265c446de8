"""What runs in place of an exported program: its own graph, or what Inductor makes of it."""
