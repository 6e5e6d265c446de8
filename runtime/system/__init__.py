"""What the operating system offers: memory, the page cache, limits, atomic writes, threads."""
