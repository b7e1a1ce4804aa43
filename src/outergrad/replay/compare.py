"""Whether replays are like their forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.core.blocks import ReplayError
from outergrad.replay.fingerprint import is_like


class _Pair(NamedTuple):
    """The fingerprints of a forward and of its replay, and how far they may be apart."""

    site: int
    member: int
    sent: Tensor
    found: Tensor
    tolerance: float


class Comparison:
    """Collects fingerprints: they are read once, for a device waits whenever it is asked."""

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []

    def note(self, site: int, member: int, sent: Tensor, found: Tensor, tolerance: float) -> None:
        """One use of a module.

        Args:
            site: whose forward it was.
            member: which of the block's modules.
            sent: fingerprint of the forward.
            found: of the replay.
            tolerance: see `is_like`.
        """
        self._pairs.append(_Pair(site, member, sent, found, tolerance))

    def check(self) -> None:
        """Reads them.

        Raises:
            ReplayError: one was not like its forward.
        """
        for pair in self._pairs:
            if not are_like(pair.sent, pair.found, pair.tolerance):
                raise ReplayError(pair.site, pair.member)


def are_like(sent: Tensor, found: Tensor, tolerance: float) -> bool:
    """Whether two fingerprints are of the same outputs, see `is_like`."""
    if sent.shape != found.shape:
        return False
    pairs = zip(_numbers(sent), _numbers(found), strict=True)
    return all(is_like(one, other, tolerance) for one, other in pairs)


def _numbers(fingerprint: Tensor) -> list[list[float]]:
    return fingerprint.view(torch.float32).tolist()


@contextmanager
def failures_told(site: int, member: int) -> Iterator[None]:
    """An error inside is that of a replay; one that memory was short of stays what it is."""
    try:
        yield
    except (ReplayError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ReplayError(site, member) from error
