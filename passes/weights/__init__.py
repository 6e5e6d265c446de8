"""What the weights of a program are, which memory they share, and which nodes read them."""
