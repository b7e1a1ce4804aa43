"""Sums that sites add up themselves: where a ring would wait for the link at each of its hops.

Two sites send each other all of a sum, in one round. More sites take two rounds: each adds up a
part, which all others send it theirs of, and then sends them what it found. A site sends as many
bytes as in a ring, 2 (S - 1) / S of the tensor, and all have the same sum to the bit.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad.comm.cost import RingCost
from outergrad.core.transport import Work

Exchange = Callable[[Sequence[Tensor], Sequence[int], int], Work]
"""Starts a round: what every site gets, the lengths of what each has for this one, which round."""

_LEAST_BYTES = 16
"""For each of more than two sites, so that it has a number to add up, of whatever dtype."""


def lengths(cost: RingCost) -> range:
    """Of the sums, in bytes, that are added up on a transport of this cost."""
    least = 1 if cost.sites == 2 else _LEAST_BYTES * cost.sites
    return range(least, int(min(cost.added_bytes, sys.maxsize - 1)) + 1)


def rounds(numel: int, rank: int, sites: int) -> list[list[int]]:
    """How many numbers of a sum each site has for this one, round by round."""
    if sites == 2:
        return [[numel, numel]]
    parts = [numel // sites + (site < numel % sites) for site in range(sites)]
    return [[parts[rank]] * sites, parts]


class AddedUp:
    """The sums that are under way on one transport.

    Second rounds begin in the order of the first ones, when the first of them is waited for.

    Args:
        rank: this site.
        sites: S.
    """

    def __init__(self, rank: int, sites: int) -> None:
        self._rank, self._sites = rank, sites
        self._in_first_round: deque[_InTwoRounds] = deque()

    def start(self, flat: Tensor, exchange: Exchange, result: Callable[[], Any]) -> Work:
        """Begins to sum a tensor over the sites, in place.

        Args:
            flat: 1-D; its memory is read until the sum is there.
            exchange: starts the rounds of this sum.
            result: what `wait` returns.
        """
        sizes = rounds(flat.numel(), self._rank, self._sites)
        if self._sites == 2:
            return _InOneRound(flat, exchange([flat, flat], sizes[0], 0), result)
        begun = _InTwoRounds(flat, sizes, exchange, result, self._go_on)
        self._in_first_round.append(begun)
        return begun

    def _go_on(self) -> None:
        while self._in_first_round:
            self._in_first_round.popleft().begin_second()


class _InOneRound:
    """Between two sites."""

    def __init__(self, flat: Tensor, work: Work, result: Callable[[], Any]) -> None:
        self._flat, self._work, self._result = flat, work, result

    def wait(self) -> Any:
        """The sum, in the order of sites."""
        torch.add(*self._work.wait(), out=self._flat)
        return self._result()


class _InTwoRounds:
    """Among more sites."""

    def __init__(
        self,
        flat: Tensor,
        sizes: Sequence[list[int]],
        exchange: Exchange,
        result: Callable[[], Any],
        go_on: Callable[[], None],
    ) -> None:
        self._flat, self._exchange, self._result, self._go_on = flat, exchange, result, go_on
        self._of_part, self._of_all = sizes
        self._work = exchange(flat.split(self._of_all), self._of_part, 0)

    def begin_second(self) -> None:
        """Adds up this site's part, in the order of sites, and begins to send it to all."""
        first, second, *more = self._work.wait()
        total = torch.add(first, second)
        for part in more:
            total.add_(part)
        self._work = self._exchange([total] * len(self._of_all), self._of_all, 1)

    def wait(self) -> Any:
        """The sum. When all parts of it are here, all sites have what this one sent of its own."""
        self._go_on()
        torch.cat(self._work.wait(), out=self._flat)
        return self._result()
