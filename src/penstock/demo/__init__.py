"""The demo: a decoder four times as big as its memory cap, then a sentence encoder with real weights."""

from __future__ import annotations

from penstock.demo.main import run

__all__ = ["run"]
