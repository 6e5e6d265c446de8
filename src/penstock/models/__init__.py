"""What is known of a model before it runs: configuration, size and time, and what will not export."""
