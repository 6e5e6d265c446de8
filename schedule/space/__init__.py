"""Where bytes lie: the layout of storages, the spans that it is cut into, and addresses in an arena."""
