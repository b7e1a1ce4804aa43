"""Attacks on gradients: one file each, tensors in and tensors out.

None of them is shown the truth. Each checks by itself whether it has found something, and returns
nothing where it has not: what it claims can then be counted as right or as a false alarm.
"""
