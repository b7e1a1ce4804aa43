"""Optimizers that go well with gradients of low rank, or with sparse variables."""

from outergrad.optim.cogd import CoGD
from outergrad.optim.matrices import muon_groups
from outergrad.optim.muon import Muon
from outergrad.optim.orthonormal import newton_schulz
from outergrad.optim.outer_muon import OuterMuon

__all__ = ["CoGD", "Muon", "OuterMuon", "muon_groups", "newton_schulz"]
