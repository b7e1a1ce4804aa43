"""The commands of ``outergrad``, one file each."""
