"""When things happen: transfers, the event graph that orders them, and its steady period."""
