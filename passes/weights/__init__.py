"""The weights of a program: their parts, the memory that they share, and the nodes that read them."""
