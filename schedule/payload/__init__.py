"""The file between compile time and run time: payload.json, read, written and checked."""
