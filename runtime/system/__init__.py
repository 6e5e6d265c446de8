"""What the operating system offers: memory, the page cache, limits, mounts, atomic writes, threads."""
