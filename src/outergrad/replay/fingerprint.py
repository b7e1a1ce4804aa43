"""Fingerprints of a block's outputs, which tell whether a replay agrees with its forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from outergrad.core.errors import ReplayError

PROJECTIONS = 3
"""Number of fixed vectors. For an output that differs by ten times the tolerance, one projection
misses it in one step out of ten, three in one step out of a thousand."""

_HALF = {torch.float16: 2e-2, torch.bfloat16: 6e-2}
_SAME_CPU = 1e-4
_TF32 = 4e-3
"""Relative tolerance of float32: a GPU may round factors to TF32 in the replay alone, too."""

NEVER = -1.0
"""Stand-in for a norm that no output has, hence no replay agrees with it."""


def fingerprint(outputs: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each output and its products with fixed vectors, as bits.

    Args:
        outputs: Y tensors of any shape, of floating dtypes.

    Returns:
        (Y, 1 + PROJECTIONS) of float32, viewed as int32: codecs leave whole numbers as they are.
    """
    with torch.no_grad():
        numbers = [_numbers(y.detach()) for y in outputs]
    return torch.stack(numbers).view(torch.int32)


def never_like(fingerprint: Tensor) -> Tensor:
    """Returns a fingerprint of the same shape that no output has."""
    return torch.full(fingerprint.shape, NEVER, device=fingerprint.device).view(torch.int32)


def is_like(sent: Tensor, found: Tensor, tolerance: float) -> bool:
    """True if two fingerprints are those of the same outputs, up to rounding.

    An output that is not finite cannot be compared and passes: its gradient will not be finite
    either.

    Args:
        sent: fingerprint of the forward pass.
        found: fingerprint of the replay.
        tolerance: largest difference of each output, relative to its norm.
    """
    if sent.shape != found.shape:
        return False
    # One transfer for both, since each waits for the device.
    both = torch.stack([sent, found]).view(torch.float32).tolist()
    pairs = zip(*both, strict=True)
    return all(
        abs(a - b) <= tolerance * one[0] or not all(map(math.isfinite, one))
        for one, other in pairs
        for a, b in zip(one, other, strict=True)
    )


def tolerance(dtypes: Iterable[torch.dtype], device: torch.device, *, same_machine: bool) -> float:
    """Returns the difference that rounding may cause between outputs, relative to their norm.

    Args:
        dtypes: dtypes of the computation.
        device: device of the computation.
        same_machine: True if this site computed both the forward pass and the replay.
    """
    coarse = [_HALF[dtype] for dtype in dtypes if dtype in _HALF]
    return max([*coarse, _SAME_CPU if same_machine and device.type == "cpu" else _TF32])


def _numbers(y: Tensor) -> Tensor:
    """Norm and projections, (1 + PROJECTIONS,).

    The vectors are outer products of two shorter ones, which are cheap to make.
    """
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
    """Fixed vector of mean 0 and variance 1, equal on all machines; draws from no global stream."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(length, generator=generator, dtype=torch.float32, device="cpu")
    return ((2 * uniform - 1) * math.sqrt(3)).to(device)


class Comparison:
    """Pairs of fingerprints, collected to be read at once, since each read waits for the device."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int, Tensor, Tensor, float]] = []

    def note(self, site: int, member: int, sent: Tensor, found: Tensor, tolerance: float) -> None:
        """Adds one use of a module.

        Args:
            site: site of the forward pass.
            member: index of the module in its block.
            sent: fingerprint of the forward pass.
            found: fingerprint of the replay.
            tolerance: see `is_like`.
        """
        self._pairs.append((site, member, sent, found, tolerance))

    def check(self) -> None:
        """Compares all pairs.

        Raises:
            ReplayError: a replay differs from its forward pass.
        """
        for site, member, sent, found, tolerance in self._pairs:
            if not is_like(sent, found, tolerance):
                raise ReplayError(site, member)


@contextmanager
def failures_told(site: int, member: int) -> Iterator[None]:
    """Context that turns errors into a ReplayError, except for out-of-memory errors."""
    try:
        yield
    except (ReplayError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ReplayError(site, member) from error


_NAMED = "or leave the block out of blocks="
_UNASKED = "or use another method for it, as og.DAD()"


def unrepeated(name: str, told: str, *, explicit: bool) -> str:
    """Returns the error text for a replay that differs: names the block and the remedies.

    Args:
        name: full name of the module.
        told: start of the sentence: which computation differed from the forward pass.
        explicit: True if the user named the module in `blocks`.
    """
    return (
        f"block {name!r}: {told} did not get what the forward gave. It must read nothing but its "
        f"arguments and parameters: no attribute that the model sets, no counter, no random "
        f"numbers of Python or numpy, no setting or kind of device that other sites do not have. "
        f"Pass values as arguments, draw random numbers with torch, "
        f"{_NAMED if explicit else _UNASKED}"
    )
