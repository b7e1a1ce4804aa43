"""The received parts of messages, assembled for the collectives of a site."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from outergrad.core.errors import ExchangeError
from outergrad.star.frames import ALL, Frame, Kind
from outergrad.star.window import cost_of

Named = Callable[[int], str]
"""Returns the name of a sender."""
EARLY_BYTES = 1 << 30
"""Bytes that a sender may always be ahead of the collectives that this site has started."""
_COLLECTIVES, _TIMES = 1 << 10, 4
"""A sender may also be ahead by `_TIMES` times the bytes of this site's last `_COLLECTIVES`
collectives, which cover a step and the next."""


class Early:
    """A bound on the bytes that a sender may send before this site has started the collective.

    A site that is ahead may send all messages of a step before this site has begun it. So the bound
    follows from the sizes of this site's recent collectives; a site that sends more is lying.
    """

    def __init__(self) -> None:
        self._nbytes: Counter[int] = Counter()
        self._asked: deque[int] = deque(maxlen=_COLLECTIVES)
        self._room = EARLY_BYTES
        self.refused: set[int] = set()
        """Senders that exceeded the bound: none of their early parts is kept any more."""

    def takes(self, frame: Frame) -> bool:
        """Counts a part whose collective has not started here; True if the part is to be kept."""
        self._nbytes[frame.sender] += cost_of(frame)
        if self._nbytes[frame.sender] > self._room:
            self.refused.add(frame.sender)
        return frame.sender not in self.refused

    def ask(self, sizes: Mapping[int, int], early: Mapping[int, int]) -> None:
        """Notes a collective that this site starts: bytes per sender, and those that came early."""
        self._nbytes.subtract(early)
        if len(self._asked) == _COLLECTIVES:
            self._room -= _TIMES * self._asked[0]
        self._asked.append(max(sizes.values(), default=0))
        self._room += _TIMES * self._asked[-1]


@dataclass
class _Message:
    """A message of one sender, whose parts come in order.

    Attributes:
        early: parts that came before the length of the message was known.
        room: buffer for the whole message, once its length is known.
        here: bytes that have come.
    """

    early: list[Frame] = field(default_factory=list)
    room: np.ndarray | None = None
    here: int = 0

    @property
    def is_whole(self) -> bool:
        return self.room is not None and self.here == len(self.room)

    def take(self, frame: Frame, named: Named) -> None:
        if self.room is None:
            self.early.append(frame)
            return
        if frame.offset != self.here or frame.total != len(self.room):
            raise ExchangeError(
                f"{named(frame.sender)} sent {frame.total} bytes, where {len(self.room)} were "
                f"agreed",
                () if frame.sender == ALL else (frame.sender,),
            )
        end = self.here + len(frame.payload)
        self.room[self.here : end] = np.frombuffer(frame.payload, np.uint8)
        self.here = end


class Arrival:
    """The messages that come for one collective; callers hold the lock of the line.

    Args:
        named: returns the name of a sender.
    """

    def __init__(self, named: Named) -> None:
        self._named = named
        self._messages: dict[int, _Message] = {}
        self._kind: Kind | None = None
        self._error: ExchangeError | None = None
        self.changes = 0
        """Number of parts that have come."""

    @property
    def is_expected(self) -> bool:
        """True if this site has started the collective."""
        return self._kind is not None

    def early_bytes(self) -> dict[int, int]:
        """Returns the bytes of each sender that came before the collective started here."""
        early = {sender: message.early for sender, message in self._messages.items()}
        return {sender: sum(map(cost_of, frames)) for sender, frames in early.items()}

    def take(self, frame: Frame) -> None:
        """Takes a part of a message; `missing` raises if the part was not agreed."""
        self.changes += 1
        try:
            self._check(frame.kind, frame.sender)
            self._messages.setdefault(frame.sender, _Message()).take(frame, self._named)
        except ExchangeError as error:
            self._error = self._error or error

    def fail(self, error: ExchangeError) -> None:
        """Notes that the collective cannot be completed."""
        self._error = self._error or error

    def came_from(self, sender: int) -> bool:
        """True if a part of a message of this sender has come, even if nobody expected it yet."""
        return sender in self._messages and bool(self._messages[sender].early)

    def expect(self, kind: Kind, sizes: Mapping[int, int]) -> None:
        """Makes room for the messages of the collective, which this site starts.

        Args:
            kind: kind of the messages.
            sizes: bytes from each sender.

        Raises:
            ExchangeError: there is no room, or parts of something else have come already.
        """
        self._kind = kind
        early, self._messages = (
            self._messages,
            {s: _Message(room=room_for(n)) for s, n in sizes.items()},
        )
        for sender, message in early.items():
            for frame in message.early:
                self._check(frame.kind, sender)
                self._messages[sender].take(frame, self._named)

    def _check(self, kind: Kind, sender: int) -> None:
        if self._kind is None:
            return
        if kind != self._kind or sender not in self._messages:
            raise ExchangeError(
                f"{self._named(sender)} sent a part of a {kind.name.lower()}, where nothing of it, "
                f"or a {self._kind.name.lower()}, was agreed",
                () if sender == ALL else (sender,),
            )

    def missing(self) -> set[int]:
        """Returns the senders whose message is not complete.

        Raises:
            ExchangeError: a part came that was not agreed.
        """
        if self._error is not None:
            raise self._error
        return {sender for sender, message in self._messages.items() if not message.is_whole}

    def rooms(self) -> dict[int, np.ndarray]:
        """Returns the message of each sender, once none is missing."""
        return {s: m.room for s, m in self._messages.items() if m.room is not None}


def room_for(nbytes: int) -> np.ndarray:
    """Returns room for a message.

    Raises:
        ExchangeError: there is none.
    """
    try:
        return np.empty(nbytes, np.uint8)
    except (MemoryError, ValueError) as error:
        raise ExchangeError(f"there is no room for a message of {nbytes} bytes") from error
