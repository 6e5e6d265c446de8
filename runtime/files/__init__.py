"""Weight files on the disk: written once, recognised later, and read quickly."""
