"""The proof that a plan is safe, which shares no code with the planner."""
