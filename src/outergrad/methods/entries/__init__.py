"""Sparse gradients: selection of entries, their form in messages, residuals of the others."""
