"""What comes for the collectives of a site: parts of messages, put together where they belong."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from outergrad.core.errors import ExchangeError
from outergrad.star.frames import ALL, Frame, Kind
from outergrad.star.window import cost_of

EARLY_BYTES = 1 << 30
"""Of one sender, besides: what it may have sent before this site has asked for anything."""
_COLLECTIVES, _TIMES = 1 << 10, 4
"""Of this site's last ones so much may come ahead: those of a step, and of the next."""


class Early:
    """What came before this site had asked for it: bounded, for each sender.

    One that is ahead may send all messages of a step before this site has begun it. So the bound
    follows from how much this site asked for lately; one that sends more lies.
    """

    def __init__(self) -> None:
        self._nbytes: Counter[int] = Counter()
        self._asked: deque[int] = deque(maxlen=_COLLECTIVES)
        self._room = EARLY_BYTES
        self.refused: set[int] = set()
        """Those that sent more: nothing of them is kept any more."""

    def takes(self, frame: Frame) -> bool:
        """Whether a part that nobody has asked for yet is kept; counts it."""
        self._nbytes[frame.sender] += cost_of(frame)
        if self._nbytes[frame.sender] > self._room:
            self.refused.add(frame.sender)
        return frame.sender not in self.refused

    def ask(self, sizes: Mapping[int, int], early: Mapping[int, int]) -> None:
        """This site has started a collective.

        Args:
            sizes: bytes from each sender.
            early: of these, what had come before.
        """
        self._nbytes.subtract(early)
        if len(self._asked) == _COLLECTIVES:
            self._room -= _TIMES * self._asked[0]
        self._asked.append(max(sizes.values(), default=0))
        self._room += _TIMES * self._asked[-1]


@dataclass
class _Message:
    """From one sender: parts come in order.

    Attributes:
        early: that came before it was known how long it is meant to be.
        room: for all of it, once that is known.
        here: bytes of it that have come.
    """

    early: list[Frame] = field(default_factory=list)
    room: np.ndarray | None = None
    here: int = 0

    @property
    def is_whole(self) -> bool:
        return self.room is not None and self.here == len(self.room)

    def take(self, frame: Frame) -> None:
        """One part of it."""
        if self.room is None:
            self.early.append(frame)
            return
        if frame.offset != self.here or frame.total != len(self.room):
            raise ExchangeError(
                f"{_named(frame.sender)} sent {frame.total} bytes, where {len(self.room)} were "
                f"agreed",
                () if frame.sender == ALL else (frame.sender,),
            )
        end = self.here + len(frame.payload)
        self.room[self.here : end] = np.frombuffer(frame.payload, np.uint8)
        self.here = end


class Arrival:
    """What comes for one collective. Whoever calls its methods holds the lock of the line."""

    def __init__(self) -> None:
        self._messages: dict[int, _Message] = {}
        self._kind: Kind | None = None
        self._error: ExchangeError | None = None
        self.changes = 0
        """Counts the parts that have come."""

    @property
    def is_expected(self) -> bool:
        """Whether this site has started the collective."""
        return self._kind is not None

    def early_bytes(self) -> dict[int, int]:
        """How much of each sender came before that."""
        early = {sender: message.early for sender, message in self._messages.items()}
        return {sender: sum(map(cost_of, frames)) for sender, frames in early.items()}

    def take(self, frame: Frame) -> None:
        """A part of a message has come."""
        self.changes += 1
        try:
            self._check(frame.kind, frame.sender)
            self._messages.setdefault(frame.sender, _Message()).take(frame)
        except ExchangeError as error:
            self._error = self._error or error

    def expect(self, kind: Kind, sizes: Mapping[int, int]) -> None:
        """Makes room: this site has started the collective.

        Args:
            kind: of its messages.
            sizes: bytes from each sender.

        Raises:
            ExchangeError: there is no room, or something else has come already.
        """
        self._kind = kind
        early, self._messages = (
            self._messages,
            {s: _Message(room=_room(n)) for s, n in sizes.items()},
        )
        for sender, message in early.items():
            for frame in message.early:
                self._check(frame.kind, sender)
                self._messages[sender].take(frame)

    def _check(self, kind: Kind, sender: int) -> None:
        if self._kind is None:
            return
        if kind != self._kind or sender not in self._messages:
            raise ExchangeError(
                f"{_named(sender)} sent a part of a {kind.name.lower()}, where nothing of it, or a "
                f"{self._kind.name.lower()}, was agreed",
                () if sender == ALL else (sender,),
            )

    def missing(self) -> set[int]:
        """Senders whose message is not there yet.

        Raises:
            ExchangeError: what came is not what was agreed.
        """
        if self._error is not None:
            raise self._error
        return {sender for sender, message in self._messages.items() if not message.is_whole}

    def rooms(self) -> dict[int, np.ndarray]:
        """Bytes of each sender, all there."""
        return {s: m.room for s, m in self._messages.items() if m.room is not None}


def _room(nbytes: int) -> np.ndarray:
    try:
        return np.empty(nbytes, np.uint8)
    except (MemoryError, ValueError) as error:
        raise ExchangeError(f"there is no room for a message of {nbytes} bytes") from error


def _named(sender: int) -> str:
    return "the hub" if sender == ALL else f"site {sender}"
