"""Payload in, outputs out: opens artifacts, streams their weights, and calls their programs."""
