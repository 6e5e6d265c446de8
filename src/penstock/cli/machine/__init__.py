"""Commands about this machine rather than a program: its rates, and what penstock remembers on it."""
