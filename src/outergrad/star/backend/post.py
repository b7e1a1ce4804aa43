"""The messages and sums of a process group, as a hub relays and makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outergrad.messages.raw import content
from outergrad.star.backend.works import Awaited, Rooms, Waiting
from outergrad.star.frames import ALL, Kind, Place
from outergrad.star.line import Line
from outergrad.star.sums import coded

Write = Callable[[np.ndarray], None]
"""Takes the bytes of a result."""
LARGE_BYTES = 1 << 26
"""Bytes of a message from which on its sender waits until all others are there as well. A site
keeps what comes early, and memory has an end."""


class Post(Protocol):
    """The way of a group's messages.

    Attributes:
        lane: of the group.
    """

    lane: int

    def send(self, place: Place, payload: bytes, to: int = ALL) -> None:
        """Starts to send a message to all sites of the group, or to one."""
        ...

    def expect(
        self, place: Place, sizes: Mapping[int, int], then: Callable[[Rooms], None], source: int
    ) -> Waiting:
        """Expects messages.

        Args:
            place: of the collective.
            sizes: bytes from each sender.
            then: called with the messages.
            source: rank in the group of the sender; -1 where there is more than one.
        """
        ...

    def reduce(self, numbers: Tensor, operation: str, to: int, then: Write | None) -> list[Waiting]:
        """Starts a sum, or another operation, over the sites.

        Args:
            numbers: of this site; they may change once this returns.
            operation: name, one of `sums.OPERATIONS`.
            to: rank of the only site that gets the result, or `ALL`.
            then: called with the result; None if this site gets none.
        """
        ...

    def barrier(self) -> list[Waiting]:
        """Starts to wait for all sites of the group."""
        ...

    def end(self) -> None:
        """Ends what runs for the group."""
        ...


class OpenPost(Post):
    """Messages and sums that the hub could read.

    Args:
        line: of this process.
        lane: of the group.
    """

    def __init__(self, line: Line, lane: int) -> None:
        self._line, self.lane = line, lane

    def send(self, place: Place, payload: bytes, to: int = ALL) -> None:
        """Starts to send a message to all sites of the group, or to one."""
        self._line.send(place, payload, to)

    def expect(
        self,
        place: Place,
        sizes: Mapping[int, int],
        then: Callable[[Rooms], None],
        source: int = -1,
    ) -> Awaited:
        """Expects messages."""
        return Awaited(place, self._line.expect(place, sizes), then, source)

    def reduce(self, numbers: Tensor, operation: str, to: int, then: Write | None) -> list[Waiting]:
        """Starts a sum, or another operation, which the hub makes."""
        place = self._line.place(Kind.SUM, self.lane, code_of(numbers, operation))
        awaited: list[Waiting] = []
        if then is not None:
            awaited.append(self.expect(place, {ALL: numbers.nbytes}, lambda r: then(r[ALL])))
        self.send(place, content(numbers), to)
        return awaited

    def barrier(self) -> list[Waiting]:
        """Starts to wait for all sites of the group."""
        return self.reduce(torch.zeros(1, dtype=torch.uint8), "max", ALL, lambda _: None)

    def end(self) -> None:
        """Does nothing: nothing runs."""


def code_of(numbers: Tensor, operation: str) -> int:
    """Returns the number by which frames name an operation on numbers of a dtype.

    Raises:
        ValueError: there is no such operation on them.
    """
    dtype = str(numbers.dtype).removeprefix("torch.")
    try:
        return coded(dtype, operation)
    except ValueError:
        raise ValueError(f"a hub makes no {operation!r} of numbers of type {dtype}") from None
