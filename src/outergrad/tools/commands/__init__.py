"""Commands of ``outergrad``, one file each."""
