"""The command line `penstock`: a file for each command; what they share is in `terminal/`."""
