"""Capture from autograd and optimizers: taps, hooks, class swaps, compiled graphs."""
