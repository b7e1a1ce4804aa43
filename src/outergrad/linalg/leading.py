"""Leading singular values of a gradient, estimated cheaply, and the effective rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outergrad.linalg.orthonormal import orthonormal
from outergrad.linalg.product import unscaled
from outergrad.linalg.subspace import OVERSAMPLING, start

_COLD_ITERATIONS = 3


def leading_values(
    formed_GOI: Tensor, count: int, q_GIK: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns estimated singular values, falling, (G, count), and directions for the next call.

    One iteration from the directions of the previous call: from below, and within some percent if
    the gradients are a few training steps apart. Small matrices give all values.

    Args:
        formed_GOI: the gradient.
        count: largest number of values.
        q_GIK: the directions that the previous call returned, None at the first.
    """
    columns = min(count + OVERSAMPLING, *formed_GOI.shape[1:])
    gradient = unscaled(formed_GOI)
    z_GIK = start(gradient.a_GNI, columns, q_GIK)
    for _ in range(_COLD_ITERATIONS if q_GIK is None else 1):
        p_GOK = orthonormal(gradient.times(z_GIK))
        z_GIK = gradient.transposed_times(p_GOK)
    if not math.isfinite(z_GIK.sum().item()):  # LAPACK would raise
        return z_GIK.new_full((len(z_GIK), min(count, columns)), math.nan), None
    squares_GK, u_GKK = torch.linalg.eigh(z_GIK.mT @ z_GIK)
    sigma_GK = squares_GK.flip(1).clamp(min=0).sqrt()
    return sigma_GK[:, :count], z_GIK @ u_GKK.flip(2)


def values_of_rows(deltas_GRR: Tensor, activations_GRR: Tensor, most: int) -> Tensor:
    """All singular values of `dᵀ a`, falling, (G, at most `most`), from the Gram matrices of rows.

    `sqrt(eig(Lᵀ K L))` with K = d dᵀ and L Lᵀ = a aᵀ: exact to about 1e-3 of the largest.

    Args:
        deltas_GRR: d dᵀ.
        activations_GRR: a aᵀ.
        most: largest possible rank.
    """
    deltas_GRR, activations_GRR = deltas_GRR.double(), activations_GRR.double()
    most = min(most, deltas_GRR.shape[1])
    if not math.isfinite(deltas_GRR.sum().item() + activations_GRR.sum().item()):
        return deltas_GRR.new_full((len(deltas_GRR), most), math.nan)
    squares_GR, u_GRR = torch.linalg.eigh(activations_GRR)
    root_GRR = u_GRR * squares_GR.clamp(min=0).sqrt()[:, None]
    squares_GR = torch.linalg.eigvalsh(root_GRR.mT @ deltas_GRR @ root_GRR)
    return squares_GR.flip(1).clamp(min=0).sqrt()[:, :most]


def effective_rank(sigma_GR: Tensor) -> Tensor:
    """The exponential of the entropy of singular values that are scaled to sum to one.

    Ranges from 1, one direction, to R, all values equal; 0 for a zero gradient. Source: Roy and
    Vetterli, "The effective rank: a measure of effective dimensionality", 2007.

    Args:
        sigma_GR: singular values along the last dimension.

    Returns:
        One value per group, (G,).
    """
    total_G1 = sigma_GR.sum(dim=-1, keepdim=True)
    share_GR = sigma_GR / torch.where(total_G1 == 0, 1.0, total_G1)
    rank_G = torch.special.entr(share_GR).sum(dim=-1).exp()
    return torch.where(total_G1.squeeze(-1) == 0, 0.0, rank_G)
