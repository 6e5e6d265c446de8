"""What every pass needs of `torch.fx` graphs: copying, walking, propagating, retargeting, blaming a line."""
