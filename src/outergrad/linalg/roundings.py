"""Bounds on how much longer than it is exactly a sample's gradient becomes by rounding.

A gradient that is the sum of L products `d_l a_l` is formed in numbers of float32, or float64 where
the deltas are. The error grows with the length that the products have one by one,

    m = Σ_l |d_l| |a_l|,

which may be much longer than the gradient g, where they cancel. With ε the distance of the numbers
around 1, 1.2e-7 in float32, the error of a scaled and formed gradient is a vector no longer than
about ε m. So one that is clipped as if it had the length |g| + ε m is within the limit when it is
formed, and shorter than it might be by ε m / |g| at most: by 1e-5 where m is 80 times |g|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outergrad.core.transform import SampleRows, SiteGradient
from outergrad.core.types import Slot
from outergrad.linalg.joined import side_by_side, small_of
from outergrad.linalg.outer import widened
from outergrad.linalg.site_gradient import together


def roundings(gradient: SiteGradient) -> Tensor:
    """Returns by how much each sample's gradient may be too long when it is formed, (B,).

    Errors in different parameters add up as lengths at right angles, those of slots that add to
    one parameter add up.

    Args:
        gradient: with the sample of each row, and one slot or more.
    """
    rows, groups, errors = gradient.rows, together(gradient.rows), list[Tensor]()
    small = small_of(rows, (group[0] for group in groups if len(group) == 1))
    if small:  # lengths at right angles, too
        lengths_B = torch.linalg.vector_norm(side_by_side(rows, small), dim=1)
        errors.append(lengths_B * torch.finfo(lengths_B.dtype).eps)
    for slots in (group for group in groups if group[0] not in small):
        parts = [_error(slot, rows[slot], gradient.samples) for slot in slots]
        errors.append(torch.stack(parts).sum(dim=0))
    return torch.linalg.vector_norm(torch.stack(errors), dim=0)


def _error(slot: Slot, part: SampleRows, samples: int) -> Tensor:
    d_GRO, a_GRI = part.factors.d_GRO, part.factors.a_GRI
    assert part.samples_N is not None
    length_R = _lengths(slot, widened(d_GRO), a_GRI)
    length_R *= torch.finfo(length_R.dtype).eps
    return length_R.new_zeros(samples).index_add_(0, part.samples_N, length_R)


def _lengths(slot: Slot, d_GRO: Tensor, a_GRI: Tensor) -> Tensor:
    """Length of the product of each row, with its bias, over all groups, (R,)."""
    if slot.lookup:
        return torch.linalg.vector_norm(d_GRO[0], dim=1)
    if slot.vector:
        return torch.linalg.vector_norm(d_GRO, dim=(0, 2)) * a_GRI[0, :, 0].abs()
    a_GR = torch.linalg.vector_norm(widened(a_GRI), dim=2)
    if slot.bias is not None:
        a_GR = torch.hypot(a_GR, torch.ones_like(a_GR))
    return torch.linalg.vector_norm(torch.linalg.vector_norm(d_GRO, dim=2) * a_GR, dim=0)
