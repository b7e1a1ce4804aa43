"""Weighted sums of single samples' gradients, formed, at the cost of one product.

Letters: B samples, N rows, G groups.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from outergrad.core.transform import SampleRows, SiteGradient
from outergrad.core.types import Factors, Slot
from outergrad.linalg.gradients import add_gradients
from outergrad.linalg.site_gradient import check_sampled, formed


def weighted_sum(gradient: SiteGradient, factor_B: Tensor) -> SiteGradient:
    """Returns the sum of the samples' gradients, each times its factor, formed.

    Raises:
        ValueError: the sample of some rows is unknown, or a gradient has no rows.
    """
    check_sampled(gradient)
    found: dict[str, Tensor] = {}
    for slot, part in gradient.rows.items():  # one by one: what is multiplied is a copy
        add_gradients(found, slot, [_weighted(slot, part, factor_B)], gradient.params, 1.0)
    return formed(replace(gradient, rows={}, formed=found))


def _weighted(slot: Slot, part: SampleRows, factor_B: Tensor) -> Factors:
    """Returns the rows times the factors of their samples, which are on the narrower side."""
    d_GNO, a_GNI, _ = part.factors
    factor_N = factor_B[part.samples_N].to(d_GNO.dtype)
    if slot.lookup or slot.outputs <= slot.inputs:
        return Factors(d_GNO * factor_N[:, None], a_GNI)
    b_GO = None if slot.bias is None else factor_N @ d_GNO
    return Factors(d_GNO, a_GNI * factor_N[:, None].to(a_GNI.dtype), b_GO)
