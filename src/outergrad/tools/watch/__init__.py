"""Command ``outergrad watch``: live view of a run in the terminal."""
