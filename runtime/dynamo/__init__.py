"""Modules that `torch.compile` cuts into pieces, streamed through one arena."""
