"""The engine in C++ that reads a payload and streams by its plans, and its binding to Python."""
