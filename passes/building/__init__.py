"""The export of models that are never built, which takes no memory for weights and no GPU."""
