"""A simulated device with real bytes, a virtual clock, and streams that run as late as possible."""
