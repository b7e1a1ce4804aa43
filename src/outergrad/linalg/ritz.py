"""From any orthonormal basis of outputs to the best decomposition within it."""

from __future__ import annotations

import torch
from torch import Tensor

from outergrad.linalg.low_rank import LowRank, truncate
from outergrad.linalg.product import Product
from outergrad.linalg.total import Total


def rayleigh_ritz(gradient: Product | Total, p_GOK: Tensor, rank: int, tolerance: float) -> LowRank:
    """The truncated singular value decomposition of `p pᵀ dW`, a projection of the gradient.

    A projection never exceeds its original, so the result is no worse than nothing, however
    poor the basis. Source: Halko, Martinsson and Tropp, 2011, section 5.1.

    Args:
        gradient: the map; with a tolerance, the energy of what p misses is computed, too.
        p_GOK: orthonormal (or zero) columns.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
    """
    v_GIK, sigma_GK, wt_GKK = torch.linalg.svd(
        gradient.transposed_times(p_GOK), full_matrices=False
    )
    rest_G = gradient.without(p_GOK).energy() if tolerance > 0 else None
    u_GOK = p_GOK @ wt_GKK.mT
    return truncate(u_GOK, sigma_GK, v_GIK, gradient.scale_G, rest_G, rank, tolerance)
