"""The vocabulary: what is known of programs and machines, and what a plan consists of."""
