"""Small gradients by sample of many parameters, side by side: one operation for all of them.

A model may have dozens of scales and biases, of which a norm, a bound or a sum takes longer to call
than to compute. Only gradients that `row_each` has made are joined: one row per sample, in order,
with an activation of one.

Letters: B samples, E elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from outergrad.core.transform import SampleRows
from outergrad.core.types import Factors, Slot
from outergrad.linalg.outer import widened

_SMALL = 1 << 15
"""Numbers in the gradients of all samples from which on these are not worth a copy."""


@lru_cache(maxsize=16)
def _in_order(samples: int, device: torch.device) -> Tensor:
    """Returns the index of each sample, of which there is one tensor: it is known again."""
    with torch.inference_mode(False):
        return torch.arange(samples, device=device)


@lru_cache(maxsize=16)
def _ones(samples: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(1, samples, 1, dtype=dtype, device=device)


def row_each(d_BE: Tensor) -> SampleRows:
    """Returns formed gradients of samples as rows, one per sample, of a slot of vectors."""
    about = len(d_BE), d_BE.device
    factors = Factors(d_BE[None], _ones(about[0], d_BE.dtype, about[1]))
    return SampleRows(factors, _in_order(*about))


def small_of(rows: Mapping[Slot, SampleRows], slots: Iterable[Slot]) -> Mapping[Slot, None]:
    """Returns the slots of small gradients that `row_each` has made, of one type and device.

    They are the keys, in order, so that it is quickly known whether a slot is among them.
    """
    found = [slot for slot in slots if slot.vector and _is_small(rows[slot])]
    ones = next((rows[slot].factors.a_GRI for slot in found), None)
    return dict.fromkeys(slot for slot in found if rows[slot].factors.a_GRI is ones)


def _is_small(part: SampleRows) -> bool:
    d_GBE, samples_N = part.factors.d_GRO, part.samples_N
    samples, device = d_GBE.shape[1], d_GBE.device
    return (
        0 < d_GBE.numel() <= _SMALL
        and samples_N is _in_order(samples, device)
        and part.factors.a_GRI is _ones(samples, d_GBE.dtype, device)
    )


def side_by_side(rows: Mapping[Slot, SampleRows], slots: Iterable[Slot]) -> Tensor:
    """Returns the gradients of these slots, (B, ΣE), in at least float32."""
    return torch.cat([widened(rows[slot].factors.d_GRO[0]) for slot in slots], dim=1)
