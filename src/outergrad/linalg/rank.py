"""How many ranks a gradient has in effect, and what a truncation loses."""

from __future__ import annotations

import torch
from torch import Tensor

from outergrad.core.types import Factors
from outergrad.linalg.outer import stack
from outergrad.linalg.product import cheapest, product


def effective_rank(sigma_GR: Tensor) -> Tensor:
    """The exponential of the entropy of singular values that are scaled to sum to one.

    Between 1, one direction, and R, all alike; 0 for a zero gradient. Source: Roy and Vetterli,
    "The effective rank: a measure of effective dimensionality", 2007.

    Args:
        sigma_GR: singular values along the last dimension.

    Returns:
        One value per group, (G,).
    """
    total_G1 = sigma_GR.sum(dim=-1, keepdim=True)
    share_GR = sigma_GR / torch.where(total_G1 == 0, 1.0, total_G1)
    rank_G = torch.special.entr(share_GR).sum(dim=-1).exp()
    return torch.where(total_G1.squeeze(-1) == 0, 0.0, rank_G)


def discarded_energy(factors: Factors, approximation: Factors) -> float:
    """`‖dW - dW'‖² / ‖dW‖²` over all groups, for any approximation of a gradient by factors.

    The difference is an outer product itself, of the rows of both, and the norm of an outer
    product needs Gram matrices alone. In float64, since the terms cancel: exact down to a
    relative error of about 1e-7, whatever was done to the approximation on its way.

    Args:
        factors: d_GNO and a_GNI.
        approximation: d_GRO and a_GRI.
    """
    d_GNO, a_GNI = factors.d_GRO.double(), factors.a_GRI.double()
    whole = Factors(d_GNO, a_GNI)
    minus = Factors(-approximation.d_GRO.double(), approximation.a_GRI.double())
    energy = _energy(whole)
    return (_energy(stack([whole, minus])) / torch.where(energy == 0, 1.0, energy)).item()


def _energy(factors: Factors) -> Tensor:
    gradient = cheapest(product(factors), columns=0, sweeps=0, with_energy=True)
    return gradient.energy().sum()
