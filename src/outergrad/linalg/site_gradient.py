"""Norms and multiples of a site's gradient, whole or per sample, from its rows where it has them.

Letters: B samples, N rows, G groups, L rows of the sample that has most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outergrad.core.transform import SampleRows, Samples, SiteGradient
from outergrad.core.types import Factors, RowRange, Slot
from outergrad.linalg.gradients import add_gradients
from outergrad.linalg.outer import widened


def sample_of_rows(samples: Samples, rows: int, device: torch.device) -> Tensor:
    """Returns the index of each row's sample, (N,), int64."""
    index_B = torch.arange(samples.total, device=device)
    positions = rows // max(samples.total, 1)
    if samples.positions_first:
        return index_B.repeat(positions)
    return index_B.repeat_interleave(positions)


def sampled(factors: Factors, samples: Samples) -> SampleRows:
    """Returns factors with the sample of each row; no row may belong to several samples."""
    rows, device = factors.d_GRO.shape[1], factors.d_GRO.device
    return SampleRows(factors, sample_of_rows(samples, rows, device))


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
    _check_sampled(gradient)
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

    Slots that add to the same part of a parameter are added up before the norm.

    Raises:
        ValueError: the sample of some rows is unknown, or a gradient has no rows.
    """
    _check_sampled(gradient)
    return _sum(_squared_norms(gradient, slots) for slots in together(gradient.rows)).sqrt()


def _check_sampled(gradient: SiteGradient) -> None:
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
    for slot in slots:
        touching = [g for g in groups if any(_add_up(slot, other) for other in g)]
        groups = [g for g in groups if g not in touching]
        groups.append([*(s for g in touching for s in g), slot])
    return groups


def _add_up(one: Slot, other: Slot) -> bool:
    if one.overlaps(other):
        return True
    return one.bias is not None and one.bias == other.bias and _meet(one.bias_rows, other.bias_rows)


def _meet(one: RowRange | None, other: RowRange | None) -> bool:
    return one is None or other is None or (one[0] < other[1] and other[0] < one[1])


def _squared_norms(gradient: SiteGradient, slots: Sequence[Slot]) -> Tensor:
    """Squared norm of each sample's gradient of the parts that these slots add to, (B,)."""
    used = [slot for slot in slots if gradient.rows[slot].factors.d_GRO.shape[1]]
    if not used:
        return widened(gradient.rows[slots[0]].factors.d_GRO).new_zeros(gradient.samples)
    if len(used) == 1:
        return squared_sample_norms(used[0], gradient.rows[used[0]], gradient.samples)
    return torch.stack([_of_sample(gradient, used, b) for b in range(gradient.samples)])


def _of_sample(gradient: SiteGradient, slots: Sequence[Slot], sample: int) -> Tensor:
    """Squared norm of one sample's gradient: the sum of the slots is formed."""
    found: dict[str, Tensor] = {}
    for slot in slots:
        factors, samples_N = gradient.rows[slot]
        own = samples_N == sample
        a = factors.a_GRI[own] if slot.lookup else factors.a_GRI[:, own]
        add_gradients(found, slot, [Factors(factors.d_GRO[:, own], a)], gradient.params, 1.0)
    return _sum(widened(g).square().sum() for g in found.values())


def squared_sample_norms(slot: Slot, part: SampleRows, samples: int) -> Tensor:
    """Squared norms of each sample's product of one slot, with its bias if it has one, (B,).

    `|d_bᵀ a_b|²` of the rows of sample b: with one row `|d|² |a|²`, with few by their Gram
    matrices, with many the product is formed.
    """
    assert part.samples_N is not None
    if not len(part.samples_N):
        return widened(part.factors.d_GRO).new_zeros(samples)
    d_GNO, where = widened(part.factors.d_GRO), places_of(part.samples_N, samples)
    d_BGLO = where.padded(d_GNO)
    if slot.lookup:
        ids_BL = where.padded(part.factors.a_GRI[None, :, None])[:, 0, :, 0]
        return _paired(d_BGLO, (ids_BL[:, None, :, None] == ids_BL[:, None, None]).to(d_GNO.dtype))
    a_BGLI = where.padded(part.factors.a_GRI.to(d_GNO.dtype))
    longest = d_BGLO.shape[2]
    if longest**2 <= slot.outputs * slot.inputs:
        of_weight_B = _paired(d_BGLO, a_BGLI @ a_BGLI.mT)
    else:
        of_weight_B = (d_BGLO.mT @ a_BGLI).square().sum(dim=(1, 2, 3))
    if slot.bias is None:
        return of_weight_B
    return of_weight_B + d_BGLO.sum(dim=2).square().sum(dim=(1, 2))


def _paired(d_BGLO: Tensor, pairs_BGLL: Tensor) -> Tensor:
    """`|Σ_l d_l a_lᵀ|² = Σ_lm (d_l · d_m)(a_l · a_m)`, per sample; negative roundings become 0."""
    return ((d_BGLO @ d_BGLO.mT) * pairs_BGLL).sum(dim=(1, 2, 3)).clamp_min(0)


def places_of(samples_N: Tensor, samples: int) -> _Rectangle | _Places:
    """Returns what puts rows, (G, N, W), in the places of their samples, (B, G, L, W)."""
    rows = len(samples_N)
    for positions_first in (False, True) if rows % samples == 0 else ():
        about = Samples(samples, positions_first, 0)
        if sample_of_rows(about, rows, samples_N.device).equal(samples_N):
            return _Rectangle(samples, positions_first=positions_first)
    return _Places(samples_N, samples)


class _Rectangle:
    """Rows of samples that have equally many, in order: `padded` returns views."""

    def __init__(self, samples: int, *, positions_first: bool) -> None:
        self._samples, self._positions_first = samples, positions_first

    def padded(self, t_GNW: Tensor) -> Tensor:
        if self._positions_first:
            return t_GNW.unflatten(1, (-1, self._samples)).permute(2, 0, 1, 3)
        return t_GNW.unflatten(1, (self._samples, -1)).transpose(0, 1)


class _Places:
    """Index of each of N rows among the rows of its sample."""

    def __init__(self, samples_N: Tensor, samples: int) -> None:
        self._order_N = samples_N.argsort(stable=True)
        self._sample_N = samples_N[self._order_N]
        counts_B = torch.bincount(samples_N, minlength=samples)
        start_B = counts_B.cumsum(0) - counts_B
        here_N = torch.arange(len(samples_N), device=samples_N.device)
        self._place_N = here_N - start_B[self._sample_N]
        self._shape = samples, int(counts_B.max())

    def padded(self, t_GNW: Tensor) -> Tensor:
        """(B, G, L, W), zeros behind the rows of a sample that has fewer."""
        samples, longest = self._shape
        whole_BLGW = t_GNW.new_zeros(samples, longest, t_GNW.shape[0], t_GNW.shape[2])
        whole_BLGW[self._sample_N, self._place_N] = t_GNW[:, self._order_N].transpose(0, 1)
        return whole_BLGW.transpose(1, 2)
