"""Gradients without backward: directional derivatives along directions that a seed makes."""

from outergrad.forward.activity import forward_loss
from outergrad.forward.local_mixer import LocalMixer
from outergrad.forward.seeded import SeededGradients

__all__ = ["LocalMixer", "SeededGradients", "forward_loss"]
