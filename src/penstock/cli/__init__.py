"""The command line `penstock`: a file for each command. Code that they share is in `terminal/`."""
