"""Units that come and go as calls ask for them: which stay in a pool, and how large it should be."""
