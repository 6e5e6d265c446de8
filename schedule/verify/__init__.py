"""The proof that a plan is safe, which shares nothing with the code that made the plan."""
