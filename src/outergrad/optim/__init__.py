"""Optimizers that go well with gradients of low rank."""

from outergrad.optim.muon import Muon, muon_groups
from outergrad.optim.orthonormal import newton_schulz

__all__ = ["Muon", "muon_groups", "newton_schulz"]
