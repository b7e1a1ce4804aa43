"""Buckets: how the gradients of a group of parameters are exchanged, one method per file."""
