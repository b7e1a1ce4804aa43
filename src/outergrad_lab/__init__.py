"""Data sets, models, training loops, benchmarks and experiments for outergrad.

The library never imports this package: its commands join ``outergrad`` by entry points.
"""
