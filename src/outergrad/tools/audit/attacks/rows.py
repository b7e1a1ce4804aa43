"""Rows that entered a linear layer, read off its weight and bias gradient."""

from __future__ import annotations

import torch
from torch import Tensor

_VAGUE = 2e-2
"""Relative error of a ratio by rounding from which on a unit says nothing."""
_ENOUGH = 3
"""Units that must tell the same row: two mixtures of two rows are equal by chance too often."""
_MOST_UNITS = 2048
"""Units that are compared with each other, those of the largest bias gradients."""


def alone_rows(weight_OI: Tensor, bias_O: Tensor, rounding: float = 1e-6) -> Tensor:
    """Returns the rows that some units of the layer saw alone.

    A unit whose delta is not zero for one row n only has the gradients `δ a_n` and `δ`: their
    ratio is the row itself. In a batch of one row all units are such, behind a ReLU also units that
    are active for one row. Whether a ratio is a row, and no mixture of several, further units
    with the same ratio tell: units of mixtures weigh the rows differently.

    Choose it first: it is exact and takes one comparison of the units with each other. Source:
    Phong et al., IEEE TIFS 2018 (one row); Boenisch et al., arXiv 2112.02918 (isolated rows).

    Args:
        weight_OI: Gradient of the weight, (outputs, inputs).
        bias_O: Gradient of the bias, (outputs,).
        rounding: Error of the gradients, as a share of the largest unit's.

    Returns:
        Distinct rows in float64, (rows found, inputs), those that most units tell first.
    """
    weight_OI, bias_O = weight_OI.double(), bias_O.double()
    strength_O = bias_O.abs()
    chosen_U = strength_O.argsort(descending=True)[:_MOST_UNITS]
    error_U = rounding * strength_O.max() / strength_O[chosen_U]
    clear_U = error_U < _VAGUE  # false where nothing has a gradient, too
    chosen_U = chosen_U[clear_U]
    return _told_often(weight_OI[chosen_U] / bias_O[chosen_U, None], error_U[clear_U])


def _told_often(ratios_UI: Tensor, error_U: Tensor) -> Tensor:
    """Returns one ratio, the clearest, of each group of those that agree up to their errors."""
    near_UU = torch.cdist(ratios_UI, ratios_UI) <= _allowed(ratios_UI, error_U)
    support_U = near_UU.sum(dim=1)
    found: list[int] = []
    taken_U = torch.zeros(len(ratios_UI), dtype=torch.bool)
    for unit in support_U.argsort(descending=True, stable=True).tolist():
        if support_U[unit] < _ENOUGH:
            break
        if not taken_U[unit]:
            found.append(int((near_UU[unit] & ~taken_U).nonzero()[0]))
            taken_U |= near_UU[unit]
    return ratios_UI[found]


def _allowed(ratios_UI: Tensor, error_U: Tensor) -> Tensor:
    """Returns the distance up to which two ratios may be the same, (units, units)."""
    return (error_U[:, None] + error_U) * ratios_UI.norm(dim=1)[:, None]
