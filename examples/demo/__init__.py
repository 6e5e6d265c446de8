"""The demo: a decoder four times as big as its memory cap, then a sentence encoder with real weights."""
