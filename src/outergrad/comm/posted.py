"""Receives that are posted before their messages are due, by the tags of these."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from outergrad.core.errors import ExchangeError, Failure

_TAG = 0x6F67
"""Keeps messages apart from point-to-point messages of the user's on the same group."""
UNUSED_TAG = _TAG - 1
"""No message has it."""
_FIRST_TURN_TAG, _LANES = 1 << 30, 8
"""Tags of turns begin there; each turn has one for every lane."""

Receives = list[tuple[dist.Work, Sequence[int]]]
"""Transfers, each with the sites that it depends on."""
Receiving = tuple[list[Tensor], Receives]
"""What every site sends, and the transfers that bring it."""


def tag_of(turn: int, lane: int) -> int:
    """The tag of messages; no other turn or lane has the same."""
    assert 0 <= lane < _LANES
    return _FIRST_TURN_TAG + _LANES * turn + lane if turn else _TAG + lane


def room_for(like: Tensor, size: int, rank: int) -> Tensor:
    """Room for the tensor that a site announced; memory is taken as it fills.

    Raises:
        ExchangeError: there is none for so much.
    """
    try:
        return like.new_empty(size)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ExchangeError(f"site {rank} announced a message of {size} entries") from error


class PostedReceives:
    """Receives that no exchange has taken yet, of this turn and the next."""

    def __init__(self) -> None:
        self._by_tag: dict[int, deque[Receiving]] = {}

    def add(self, tag: int, parts: list[Tensor], receives: Receives) -> None:
        """Keeps them for an exchange to come; those of one tag are taken in this order."""
        self._by_tag.setdefault(tag, deque()).append((parts, receives))

    def take(self, tag: int, sizes: Sequence[int]) -> Receiving | None:
        """Those of the next exchange of a tag, if there are some.

        Raises:
            ExchangeError: they are not of these sizes.
        """
        if not self._by_tag.get(tag):
            return None
        parts, receives = self._by_tag[tag].popleft()
        if [len(part) for part in parts] != list(sizes):
            told = "what was expected is not what comes; please report it"
            raise ExchangeError(told, kind=Failure.LOCAL)
        return parts, receives

    def forget_all_but(self, turn: int) -> None:
        """Forgets those of turns other than this one and the next."""
        tags = range(tag_of(turn, 0), tag_of(turn + 2, 0))
        self._by_tag = {tag: queue for tag, queue in self._by_tag.items() if tag in tags}
