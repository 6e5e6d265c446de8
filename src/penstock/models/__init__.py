"""What is known of a model before it runs: its configuration, its size, and what will not export."""
