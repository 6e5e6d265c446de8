"""What commands share: options, checks of what they are given, progress, tables, and how Ctrl-C ends them."""
