"""Weighted sums of single samples' gradients, formed, at the cost of one product.

Letters: B samples, N rows, G groups.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outergrad.core.transform import SampleRows, SiteGradient
from outergrad.core.types import Factors, Slot
from outergrad.linalg.gradients import add_gradients, add_rows
from outergrad.linalg.joined import side_by_side, small_of
from outergrad.linalg.outer import widened
from outergrad.linalg.site_gradient import check_sampled, formed


def weighted_sum(gradient: SiteGradient, factor_B: Tensor) -> SiteGradient:
    """Returns the sum of the samples' gradients, each times its factor, formed.

    In at least float32. It is to be rounded to the parameters' type with noise on it, and not
    before: a single sample could change the errors of all numbers of the sum.

    Raises:
        ValueError: the sample of some rows is unknown, or a gradient has no rows.
    """
    check_sampled(gradient)
    wide = {name: widened(p.new_zeros(())).expand(p.shape) for name, p in gradient.params.items()}
    found: dict[str, Tensor] = {}
    small = small_of(gradient.rows, gradient.rows)
    if small:
        all_E = factor_B.to(torch.float64) @ side_by_side(gradient.rows, small).double()
        for slot, g_E in zip(small, all_E.split([slot.numel for slot in small]), strict=True):
            p = wide[slot.weight]
            add_rows(found, slot.weight, slot.weight_rows, g_E.to(p.dtype), p)
    for slot, part in gradient.rows.items():  # one by one: what is multiplied is a copy
        if slot in small:
            continue
        add_gradients(found, slot, [_weighted(slot, part, factor_B)], wide, 1.0)
    return formed(replace(gradient, rows={}, formed=found))


def _weighted(slot: Slot, part: SampleRows, factor_B: Tensor) -> Factors:
    """Returns the rows times the factors of their samples, which are on the narrower side."""
    d_GNO, a_GNI = widened(part.factors.d_GRO), part.factors.a_GRI
    factor_N = factor_B[part.samples_N].to(d_GNO.dtype)
    if slot.lookup or slot.outputs <= slot.inputs:
        return Factors(d_GNO * factor_N[:, None], a_GNI)
    b_GO = None if slot.bias is None else factor_N @ d_GNO
    return Factors(d_GNO, a_GNI * factor_N[:, None], b_GO)
