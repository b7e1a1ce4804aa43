"""Benchmarks that compare the methods over links between sites."""
