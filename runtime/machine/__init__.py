"""What this machine can do: measured figures, remembered."""
