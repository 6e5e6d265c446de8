"""Calls of a module: taken apart, told apart by kind, and exported, one program for each kind."""
