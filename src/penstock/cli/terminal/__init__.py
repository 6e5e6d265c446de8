"""Code that commands share: options, checks of their values, progress, tables, and the answer to Ctrl-C."""
