"""The vocabulary that all rooms share: facts of programs and machines, and the decisions of a plan."""
