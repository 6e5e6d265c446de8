"""Where bytes lie: the layout of storages, spans of it, and addresses in an arena."""
