"""Stream weights while the model's own Python runs: a step is the call of a module that reads weights."""
