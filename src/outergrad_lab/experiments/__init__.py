"""Experiments of the paper: each runs by one command, from its YAML, on real data."""
