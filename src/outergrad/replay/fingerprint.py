"""A few numbers that tell the outputs of a forward from others, to compare a replay with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

PROJECTIONS = 3
"""One misses another output in a step out of ten, three in one out of a thousand, if it differs by
ten times the tolerance."""

_HALF = {torch.float16: 2e-2, torch.bfloat16: 6e-2}
_SAME_CPU = 1e-4
_TF32 = 4e-3
"""Of float32: a GPU may round the factors of products to TF32, in a replay alone, too."""

NEVER = -1.0
"""In the place of a norm: no replay is like that."""


def fingerprint(outputs: Sequence[Tensor]) -> Tensor:
    """The norm of every output and its products with fixed vectors, as bits.

    Args:
        outputs: Y tensors of any shape, of floating dtypes.

    Returns:
        (Y, 1 + PROJECTIONS) of float32, viewed as int32: codecs leave whole numbers as they are.
    """
    with torch.no_grad():
        numbers = [_numbers(y.detach()) for y in outputs]
    return torch.stack(numbers).view(torch.int32)


def never_like(fingerprint: Tensor) -> Tensor:
    """One of the same shape that no output has."""
    return torch.full(fingerprint.shape, NEVER, device=fingerprint.device).view(torch.int32)


def is_like(sent: Sequence[float], found: Sequence[float], tolerance: float) -> bool:
    """Whether two outputs are the same but for rounding, by the numbers of their fingerprints.

    One that is not finite cannot be compared: its gradient will not be finite either.

    Args:
        sent: of the forward.
        found: of the replay.
        tolerance: of the difference, relative to the norm.
    """
    if not all(map(math.isfinite, sent)):
        return True
    room = tolerance * sent[0]
    return all(abs(a - b) <= room for a, b in zip(sent, found, strict=True))


def tolerance(dtypes: Iterable[torch.dtype], device: torch.device, *, same_machine: bool) -> float:
    """How far outputs may be apart, relative to their norm, for the rounding of their computation.

    Args:
        dtypes: in which there is computed.
        device: where.
        same_machine: whether forward and replay are this site's.
    """
    coarse = [_HALF[dtype] for dtype in dtypes if dtype in _HALF]
    return max([*coarse, _SAME_CPU if same_machine and device.type == "cpu" else _TF32])


def _numbers(y: Tensor) -> Tensor:
    """(1 + PROJECTIONS,): products with outer products of vectors, which are cheap to make."""
    if not y.numel():
        return torch.zeros(1 + PROJECTIONS, device=y.device)
    y_NO = y.reshape(-1, y.shape[-1]) if y.dim() else y.reshape(1, 1)
    dtype = torch.promote_types(y.dtype, torch.float32)
    norm = torch.linalg.vector_norm(y_NO, dtype=dtype)
    (rows, columns), device = y_NO.shape, y.device
    products = [
        ((y_NO * _vector(columns, 2 * k, device)).sum(-1) * _vector(rows, 2 * k + 1, device)).sum()
        for k in range(PROJECTIONS)
    ]
    return torch.stack([norm, *products]).float()


@lru_cache(maxsize=256)
def _vector(length: int, seed: int, device: torch.device) -> Tensor:
    """Of numbers with mean 0 and variance 1, the same on every machine, drawn from no stream."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(length, generator=generator, dtype=torch.float32, device="cpu")
    return ((2 * uniform - 1) * math.sqrt(3)).to(device)
