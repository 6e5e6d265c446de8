"""The time that no plan can beat: a linear relaxation of the problem, and the residency that it suggests."""
