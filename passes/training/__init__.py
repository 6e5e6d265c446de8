"""Forward and backward of a program as two programs, in which no weight is kept from one to the other."""
