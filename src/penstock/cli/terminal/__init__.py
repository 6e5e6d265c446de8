"""What all commands share: their options, checks of what they are given, progress, tables and JSON."""
