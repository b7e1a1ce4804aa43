"""What autograd and optimizers tell: taps, hooks, swapped classes, compiled graphs."""
