"""Devices with streams of their own: what a streamer asks of one, and how weights reach it."""
