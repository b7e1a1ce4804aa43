"""The commands that this package adds to ``outergrad``, one file each."""
