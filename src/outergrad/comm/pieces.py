"""Sums of three and more sites in two rounds, to the bit as gloo's ring adds up."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outergrad.comm.work import TorchWork

_SEGMENT_BYTES = 1 << 20
"""Most bytes of a tensor that gloo's ring sends at a time."""


_first_rounds: WeakKeyDictionary[Any, deque[PiecewiseSum]] = WeakKeyDictionary()


def first_rounds_of(group: Any) -> deque[PiecewiseSum]:
    """Returns the sums of a process group that are in their first round, of all its sessions."""
    return _first_rounds.setdefault(group, deque())


class PiecewiseSum:
    """A sum of three or more sites under way: every site adds up one piece, and sends it to all.

    Second rounds start in the order of the sums of all sessions on a group: their receives are
    posted in this order, and a receive takes the next message of its tag.

    Args:
        first: parts of this site's piece on their way, whose `wait` adds them up.
        send_sum: starts to exchange the sums of all pieces.
        first_rounds: sums of the group that are in their first round; this one is added.
    """

    def __init__(
        self, first: TorchWork, send_sum: Callable[[], TorchWork], first_rounds: deque[PiecewiseSum]
    ) -> None:
        self._first: TorchWork | None = first
        self._send_sum, self._first_rounds = send_sum, first_rounds
        self._second: TorchWork | None = None
        first_rounds.append(self)

    def advance(self) -> None:
        """Starts the second round, and those of all sums before, once the first has come."""
        while self._second is None:
            self._first_rounds[0]._go_on()

    def _go_on(self) -> None:
        assert self._first is not None
        self._first.wait()
        self._second = self._send_sum()
        self._first = None  # with the parts of all sites
        self._first_rounds.popleft()

    def wait(self) -> Any:
        """Returns the sum once all pieces have come."""
        self.advance()
        assert self._second is not None
        return self._second.wait()


def ring_pieces(t: Tensor, sites: int) -> list[Tensor]:
    """Returns the piece of t that each site adds up; a spare one where t is too short.

    Args:
        t: real tensor.
        sites: S.
    """
    pieces = t.view(-1).split(list(_piece_sizes(t.numel(), t.element_size(), sites)))
    return [piece if len(piece) else t.new_zeros(1) for piece in pieces]


def piece_size(numel: int, dtype: torch.dtype, sites: int, site: int) -> int:
    """Returns the length of the piece that one site adds up."""
    return max(_piece_sizes(numel, dtype.itemsize, sites)[site], 1)


@lru_cache(maxsize=1024)
def _piece_sizes(numel: int, item_bytes: int, sites: int) -> Sequence[int]:
    """Lengths of the parts of a tensor of which gloo's ring begins the sum at the same site.

    gloo divides a tensor into segments, two per site or more, and gives each site as many.
    """
    nbytes = numel * item_bytes
    per_site = max(-(-nbytes // (_SEGMENT_BYTES // item_bytes * item_bytes * sites)), 2)
    longest = per_site * -(-nbytes // (per_site * sites * item_bytes))
    ends = [min(k * longest, numel) for k in range(sites + 1)]
    return tuple(end - start for start, end in itertools.pairwise(ends))


def add_as_a_ring(parts: Sequence[Tensor], owner: int) -> None:
    """Adds up the parts of a piece that all sites sent, into the owner's.

    A ring begins at the site before the owner, and goes down from site to site to the owner.
    """
    sites = len(parts)
    total = parts[owner - 1]
    for k in range(2, sites):
        total.add_(parts[(owner - k) % sites])
    parts[owner].add_(total)
