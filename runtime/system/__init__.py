"""Services of the operating system: memory, the page cache, limits, mounts, atomic writes, threads."""
