"""Whether replays are like their forwards, by fingerprints, and what is said of one that is not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from outergrad.core.errors import ReplayError

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


def is_like(sent: Tensor, found: Tensor, tolerance: float) -> bool:
    """Whether two fingerprints are of the same outputs, but for rounding.

    An output that is not finite cannot be compared: its gradient will not be finite either.

    Args:
        sent: of the forward.
        found: of the replay.
        tolerance: of the difference of each output, relative to its norm.
    """
    if sent.shape != found.shape:
        return False
    both = torch.stack([sent, found]).view(torch.float32).tolist()  # a device is asked once
    pairs = zip(*both, strict=True)
    return all(
        abs(a - b) <= tolerance * one[0] or not all(map(math.isfinite, one))
        for one, other in pairs
        for a, b in zip(one, other, strict=True)
    )


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


class Comparison:
    """Collects fingerprints: they are read once, for a device waits whenever it is asked."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int, Tensor, Tensor, float]] = []

    def note(self, site: int, member: int, sent: Tensor, found: Tensor, tolerance: float) -> None:
        """One use of a module.

        Args:
            site: whose forward it was.
            member: which of the block's modules.
            sent: fingerprint of the forward.
            found: of the replay.
            tolerance: see `is_like`.
        """
        self._pairs.append((site, member, sent, found, tolerance))

    def check(self) -> None:
        """Reads them.

        Raises:
            ReplayError: one was not like its forward.
        """
        for site, member, sent, found, tolerance in self._pairs:
            if not is_like(sent, found, tolerance):
                raise ReplayError(site, member)


@contextmanager
def failures_told(site: int, member: int) -> Iterator[None]:
    """An error inside is that of a replay; one that memory was short of stays what it is."""
    try:
        yield
    except (ReplayError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ReplayError(site, member) from error


_NAMED = "or leave the block out of blocks="
_UNASKED = "or use another method for it, as og.DAD()"


def unrepeated(name: str, told: str, *, explicit: bool) -> str:
    """Names the block and what to do.

    Args:
        name: full name of the module.
        told: who computed it again.
        explicit: whether the user named it in `blocks`.
    """
    return (
        f"block {name!r}: {told} did not get what the forward gave. It must read nothing but its "
        f"arguments and parameters: no attribute that the model sets, no counter, no random "
        f"numbers of Python or numpy, no setting or kind of device that other sites do not have. "
        f"Pass values as arguments, draw random numbers with torch, "
        f"{_NAMED if explicit else _UNASKED}"
    )
