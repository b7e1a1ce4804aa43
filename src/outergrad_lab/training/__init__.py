"""Training at several sites: the loop, what it is made of, and how it goes on from a checkpoint."""
