"""Devices with streams of their own: their protocol for a streamer, and the ways of weights to them."""
