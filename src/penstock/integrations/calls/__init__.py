"""Calls of a model, told apart by kind, each kind with a program of its own."""
