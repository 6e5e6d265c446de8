"""The command line `penstock`: a file for each command, and what it is given and prints."""
