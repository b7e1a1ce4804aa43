"""Norms and multiples of a site's gradient, whole or per sample, from its rows where it has them.

Letters: B samples, N rows, G groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from outergrad.core.transform import SampleRows, Samples, SiteGradient
from outergrad.core.types import Factors, RowRange, Slot
from outergrad.linalg.gradients import add_gradients
from outergrad.linalg.joined import side_by_side, small_of
from outergrad.linalg.outer import widened
from outergrad.linalg.sample_products import addends, sample_of_rows, squared_norms, squares


def sampled(factors: Factors, samples: Samples) -> SampleRows:
    """Returns factors with the sample of each row; no row may belong to several samples."""
    rows, device = factors.d_GRO.shape[1], factors.d_GRO.device
    return SampleRows(factors, sample_of_rows(samples, rows, device))


def in_units(gradient: SiteGradient) -> SiteGradient:
    """Returns the gradient with units in place of samples, where it tells them; else as it is.

    The rows of all samples of a unit become those of one sample.
    """
    unit_B = gradient.unit_B
    if unit_B is None:
        return gradient
    rows = {
        slot: part if part.samples_N is None else part._replace(samples_N=unit_B[part.samples_N])
        for slot, part in gradient.rows.items()
    }
    units = int(unit_B.max()) + 1 if len(unit_B) else 0
    return replace(gradient, rows=rows, samples=units, unit_B=None)


def scaled(gradient: SiteGradient, factor: float | Tensor) -> SiteGradient:
    """Multiplies the gradient by a number or a tensor of one element."""
    rows = {slot: _times(part, factor) for slot, part in gradient.rows.items()}
    formed = {n: (g * factor).to(g.dtype) for n, g in gradient.formed.items()}
    return replace(gradient, rows=rows, formed=formed)


def scaled_samples(gradient: SiteGradient, factor_B: Tensor) -> SiteGradient:
    """Multiplies each sample's gradient by its own factor.

    Raises:
        ValueError: the sample of some rows is unknown, or a gradient has no rows.
    """
    check_sampled(gradient)
    rows = {
        slot: _times(part, factor_B[part.samples_N][:, None])
        for slot, part in gradient.rows.items()
    }
    return replace(gradient, rows=rows)


def _times(part: SampleRows, factor: float | Tensor) -> SampleRows:
    factors = part.factors
    d_GNO = (factors.d_GRO * factor).to(factors.d_GRO.dtype)
    return part._replace(factors=Factors(d_GNO, factors.a_GRI))


def formed(gradient: SiteGradient) -> SiteGradient:
    """Returns the gradient without rows: a tensor for every parameter, of its shape."""
    found: dict[str, Tensor] = {}
    for slot, part in gradient.rows.items():
        add_gradients(found, slot, [part.factors], gradient.params, 1.0)
    whole = {**gradient.formed, **found}
    zeros = {n: torch.zeros_like(p) for n, p in gradient.params.items() if n not in whole}
    return replace(gradient, rows={}, formed={**whole, **zeros})


def norm(gradient: SiteGradient) -> Tensor:
    """Euclidean norm over all parameters, a tensor of one element."""
    return _sum(widened(g).square().sum() for g in formed(gradient).formed.values()).sqrt()


def sample_norms(gradient: SiteGradient) -> Tensor:
    """Euclidean norm of each sample's gradient over all parameters, (B,).

    Slots that add to the same part of a parameter are added up before the norm. Of weights in
    `gradient.sent` it is the norm of what is sent. Where the rows of a sample cancel, the result is
    as near as that of gradients formed in float32: off by about 1e-7 of the length that its rows
    have without cancelling (`roundings`).

    Raises:
        ValueError: the sample of some rows is unknown, or a gradient has no rows.
    """
    check_sampled(gradient)
    groups = together(gradient.rows)
    small = small_of(gradient.rows, (group[0] for group in groups if len(group) == 1))
    rest = [group for group in groups if group[0] not in small]
    parts = [_squared_norms(gradient, slots) for slots in rest]
    if small:
        parts.append(squares(side_by_side(gradient.rows, small)))
    dtypes = {part.factors.d_GRO.dtype for part in gradient.rows.values()}
    return _sum(parts).sqrt().to(reduce(torch.promote_types, dtypes, torch.float32))


def check_sampled(gradient: SiteGradient) -> None:
    """Checks that the sample of every row is known.

    Raises:
        ValueError: it is not.
    """
    missing = [*gradient.formed, *(s.weight for s, p in gradient.rows.items() if _unknown(p))]
    if missing:
        raise ValueError(
            f"which sample the gradient of {missing[0]!r} is of is not known: set needs_samples "
            f"= True, and do not form gradients before"
        )


def _unknown(part: SampleRows) -> bool:
    return part.samples_N is None


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(dim=0)


def together(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Groups slots that add to the same part of a weight or bias, directly or by way of others."""
    groups: list[list[Slot]] = []
    seen: set[str] = set()
    for slot in slots:
        alone = seen.isdisjoint(slot.params)
        touching = [] if alone else [g for g in groups if any(add_up(slot, other) for other in g)]
        groups = groups if alone else [g for g in groups if g not in touching]
        groups.append([*(s for g in touching for s in g), slot])
        seen.update(slot.params)
    return groups


def add_up(one: Slot, other: Slot) -> bool:
    """True if two slots add to the same part of a weight or bias."""
    return any(name == n and _meet(rows, r) for name, rows in _feeds(one) for n, r in _feeds(other))


def _feeds(slot: Slot) -> list[tuple[str, RowRange | None]]:
    bias = [] if slot.bias is None else [(slot.bias, slot.bias_rows)]
    return [(slot.weight, slot.weight_rows), *bias]


def _meet(one: RowRange | None, other: RowRange | None) -> bool:
    return one is None or other is None or (one[0] < other[1] and other[0] < one[1])


def _squared_norms(gradient: SiteGradient, slots: Sequence[Slot]) -> Tensor:
    """Squared norm of each sample's gradient of the parts that these slots add to, (B,)."""
    used = [slot for slot in slots if gradient.rows[slot].factors.d_GRO.shape[1]]
    if not used:
        d_GRO = gradient.rows[slots[0]].factors.d_GRO
        return d_GRO.new_zeros(gradient.samples, dtype=torch.float64)
    exact, sent = len(used) > 1, gradient.sent or {}
    parts = [
        one
        for slot in used
        for one in addends(
            slot, gradient.rows[slot], gradient.samples, sent.get(slot.weight), exact=exact
        )
    ]
    return squared_norms(parts)
