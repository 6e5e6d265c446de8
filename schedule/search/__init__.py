"""The searches for a plan: one for each kind of arena."""
