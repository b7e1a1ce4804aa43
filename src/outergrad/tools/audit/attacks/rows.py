"""Rows that entered a linear layer, read off its weight and bias gradient."""

from __future__ import annotations

import torch
from torch import Tensor

_FAINT = 1e-5
"""Share of the largest bias gradient below which a unit says nothing: rounding drowns it."""
_AGREEING = 1e-4
"""Relative distance within which two units tell the same row."""
_MOST_UNITS = 2048
"""Units that are compared with each other, those of the largest bias gradients."""


def alone_rows(weight_OI: Tensor, bias_O: Tensor) -> Tensor:
    """Returns the rows that some units of the layer saw alone.

    A unit whose delta is not zero for one row n only has the gradients `δ a_n` and `δ`: their
    ratio is the row itself. In a batch of one row all units are such, behind a ReLU also units that
    are active for one row. Whether a ratio is a row, and no mixture of several, a second unit with
    the same ratio tells: units of mixtures weigh the rows differently.

    Choose it first: it is exact and takes one comparison of the units with each other. Source:
    Phong et al., IEEE TIFS 2018 (one row); Boenisch et al., arXiv 2112.02918 (isolated rows).

    Args:
        weight_OI: Gradient of the weight, (outputs, inputs).
        bias_O: Gradient of the bias, (outputs,).

    Returns:
        Distinct rows in float64, (rows found, inputs), those that most units tell first.
    """
    weight_OI, bias_O = weight_OI.double(), bias_O.double()
    strength_O = bias_O.abs()
    chosen_U = strength_O.argsort(descending=True)[:_MOST_UNITS]
    chosen_U = chosen_U[strength_O[chosen_U] > _FAINT * strength_O.max()]
    ratios_UI = weight_OI[chosen_U] / bias_O[chosen_U, None]
    return _told_twice(ratios_UI)


def _told_twice(ratios_UI: Tensor) -> Tensor:
    """Returns one ratio, the first, of each group of two and more that agree."""
    near_UU = torch.cdist(ratios_UI, ratios_UI) <= _AGREEING * ratios_UI.norm(dim=1)[:, None]
    support_U = near_UU.sum(dim=1)
    found: list[int] = []
    taken_U = torch.zeros(len(ratios_UI), dtype=torch.bool)
    for unit in support_U.argsort(descending=True, stable=True).tolist():
        if support_U[unit] < 2:
            break
        if not taken_U[unit]:
            group_U = near_UU[unit] & ~taken_U
            found.append(int(group_U.nonzero()[0]))  # of the largest bias gradient: least rounded
            taken_U |= near_UU[unit]
    return ratios_UI[found]
