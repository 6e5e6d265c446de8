"""The memory in which units come and go, and what calls asked for."""
