"""Data sets, models, training loops, the bench and the experiments that outergrad is tried with.

The library never imports this package: its commands join ``outergrad`` by entry points.
"""
