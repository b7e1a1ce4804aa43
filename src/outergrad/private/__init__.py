"""Differential privacy: clipped samples, and noise that is shared out among the sites."""
