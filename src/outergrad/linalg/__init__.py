"""Tensor mathematics alone, independent of modules and communication."""
