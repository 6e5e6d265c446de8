"""Facts of a model before it runs: its configuration, size and time, and what prevents its export."""
