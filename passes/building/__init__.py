"""Models that are exported without ever being built: no memory, no initialisation, no GPU."""
