"""Tools for `torch.fx` graphs: copying, walking, running on fake tensors, and moving to another device."""
