"""What no plan can beat: a linear relaxation of the whole problem, and the residency that it suggests."""
