"""Training at several sites: the loop, its parts, and resuming from checkpoints."""
