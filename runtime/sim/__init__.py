"""A simulated device: real bytes, a virtual clock, and streams that run as late as they may."""
