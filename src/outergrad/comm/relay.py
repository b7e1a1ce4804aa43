"""Messages gathered in pieces: a site sends each piece once, and all sites pass them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad.core.transport import Work


class GatherInPieces:
    """Messages of all sites under way in two rounds.

    In the first, every site gets one piece of each message. In the second it sends all of these to
    all sites. So a long message costs its sender no more than a short one costs all others.

    Args:
        first: pieces for this site on their way.
        pass_on: starts to send the pieces that came, and to gather those of all sites.
    """

    def __init__(self, first: Work, pass_on: Callable[[Any], Work]) -> None:
        self._first: Work | None = first
        self._pass_on = pass_on
        self._second: Work | None = None

    def advance(self) -> None:
        """Starts the second round, once the first has come."""
        if self._first is not None:
            arrived, self._first = self._first.wait(), None
            self._second = self._pass_on(arrived)

    def wait(self) -> Any:
        """Returns the messages of all sites."""
        self.advance()
        assert self._second is not None
        return self._second.wait()


def piece_lengths(sizes: Sequence[int]) -> list[int]:
    """Returns the length of the pieces of every site's message: equal ones, one for each site."""
    sites = len(sizes)
    return [max(-(-size // sites), 1) for size in sizes]


def pieces_of(t: Tensor, sites: int) -> list[Tensor]:
    """Returns the pieces of a 1-D tensor, one for each site; the last ones end in zeros."""
    length = piece_lengths([len(t)] * sites)[0]
    padded = t.new_zeros(sites * length)
    padded[: len(t)] = t
    return list(padded.view(sites, length))


def joined(passed_on: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Returns the messages of all sites, from what each site passed on: a piece of every message.

    Args:
        passed_on: one tensor per site.
        sizes: lengths of the messages.
    """
    columns = torch.stack(list(passed_on)).split_with_sizes(piece_lengths(sizes), dim=1)
    return [t.reshape(-1)[:size] for t, size in zip(columns, sizes, strict=True)]
