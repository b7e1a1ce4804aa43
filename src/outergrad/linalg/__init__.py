"""Tensor mathematics alone: nothing here knows modules or communication."""
