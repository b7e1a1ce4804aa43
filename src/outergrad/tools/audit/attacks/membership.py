"""Membership: whether a known sample was in the batch of a released step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def membership_scores(
    released: Mapping[str, Tensor], candidates: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    """Returns a score of each candidate: the larger, the likelier it was in the batch.

    It is the product of the candidate's own gradient, computed with the weights that everybody
    has, with the released one, over the candidate's squared norm: one over the rows of the batch
    for a member whose gradient is orthogonal to all others, zero for a foreign one. It is the most
    powerful test where the rest is Gaussian noise, as with differential privacy. Choose it where
    nothing can be read off exactly. Source: Leemann et al., arXiv 2306.07273.

    Args:
        released: The gradient as an observer has it, by parameter.
        candidates: Gradient of each candidate sample, by parameter.
    """
    return torch.stack([_score(released, one) for one in candidates])


def _score(released: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Tensor:
    names = [name for name in released if name in own]
    if not names:
        return torch.zeros((), dtype=torch.float64)
    products = sum((released[n].double() * own[n].double()).sum() for n in names)
    squares = sum(own[n].double().square().sum() for n in names)
    return torch.as_tensor(products / squares if squares > 0 else 0.0, dtype=torch.float64)
