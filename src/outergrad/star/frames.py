"""Frames between a site and the hub, read without pickle, with their greetings and questions."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

MAGIC, VERSION = b"OGST", 2
MOST_BYTES = 1 << 20
"""Most bytes of the payload of a frame."""
MOST_MESSAGE_BYTES = MOST_BYTES + (1 << 16)
"""Most bytes of a gRPC message, which holds one or more frames."""
LANES = 8
"""Lanes of all sites of a run. Later ones belong to groups, which sites open."""
MOST_LANES = 1 << 16
AWAY = "away"
"""Name of the hub's own text: a list of the ranks of the sites that it waits for."""
ALL = 0xFFFF
"""Rank in place of a recipient, if there is no single one; as a sender, the hub."""

_HEADER = struct.Struct("!4sBBHBQQQHHQQII")
HEADER_BYTES = _HEADER.size
_LEAST_CHUNK, _FIRST_CHUNK, _ALIGNED = 1 << 16, 1 << 14, 64


class Kind(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    """Greeting of a site, its first frame on a stream (`greetings.Hello`)."""
    WELCOME = 2
    """Greeting of the hub, its first frame on a stream (`greetings.Welcome`)."""
    ACK = 3
    """Number of the last frame received, and how much the other side may send."""
    READY = 4
    """The run begins."""
    GATHER = 5
    """Part of a message for all other sites."""
    EACH = 6
    """Part of a message for one other site."""
    SUM = 7
    """Part of a tensor to be summed; the hub answers with the sum."""
    TEXT = 8
    """Text for all other sites, under a name."""
    GONE = 9
    """The sender leaves, or is lost."""
    FAULT = 10
    """The run cannot go on; the payload says why."""
    FIRST = 11
    """Text to be written into a slot of the board, unless it is written."""
    PUT = 12
    """Content, or a piece of one, to be written into a slot of the board, unless it is written."""
    GET = 13
    """Question for the content of a slot of the board."""
    ANSWER = 14
    """The content that the slot then has; `number` is that of the question."""
    PART = 15
    """The sender took part in some steps: for the log."""
    INVITED = 16
    """The sites that train admit the site: their run, and who takes part afterwards."""
    GROUP = 17
    """Question for the lane of a group of sites (`groups.Groups`)."""
    STORE = 18
    """Question to the store of the run (`values.Values`)."""
    VOID = 19
    """A sum that cannot be made any more: the payload says why."""
    LATE = 20
    """Question for the sites whose part of a sum, of a lane and number, is missing at the hub."""
    DROP = 21
    """Name of a slot of the board whose content, of the sender, may be freed."""
    LETTER = 22
    """Part of a letter to one other site, which need not have asked for it (`lines.StarLines`)."""


UNNUMBERED = frozenset({Kind.HELLO, Kind.WELCOME, Kind.ACK})
"""Kinds that are not sent again after a stream breaks, and so have no sequence number."""
DATA = frozenset({Kind.GATHER, Kind.EACH, Kind.SUM, Kind.LETTER})


class MalformedError(ValueError):
    """Bytes that neither a site nor the hub sends."""


class Frame(NamedTuple):
    """A message, or a chunk of one.

    Attributes:
        kind: of the frame.
        payload: at most `MOST_BYTES`.
        lane: of the collective; each lane has its own order.
        dtype: of a sum, as an index into `sums.DTYPES`; with its operation, as `sums.coded` says.
        run: number of the run, given by the hub.
        sequence: number of the frame, counted from this side to the other.
        number: index of the collective in its lane, or number of a question.
        sender: rank of a site, or `ALL`.
        recipient: rank of a site, or `ALL`; of a sum, the one site that gets it.
        offset: of the payload in the whole message, bytes.
        total: bytes of the whole message.
        checksum: CRC-32 of the payload, if it is known already.
    """

    kind: Kind
    payload: bytes | memoryview = b""
    lane: int = 0
    dtype: int = 0
    run: int = 0
    sequence: int = 0
    number: int = 0
    sender: int = ALL
    recipient: int = ALL
    offset: int = 0
    total: int = 0
    checksum: int | None = None

    def packed(self) -> bytes:
        """Returns the frame as bytes."""
        return packed([self])

    def header(self) -> bytes:
        """Returns the bytes before the payload."""
        checksum = zlib.crc32(self.payload) if self.checksum is None else self.checksum
        return _HEADER.pack(
            *(MAGIC, VERSION, self.kind, self.lane, self.dtype, self.run, self.sequence),
            *(self.number, self.sender, self.recipient, self.offset, self.total),
            *(len(self.payload), checksum),
        )


def packed(frames: Iterable[Frame]) -> bytes:
    """Returns frames as one gRPC message."""
    return b"".join(part for frame in frames for part in (frame.header(), frame.payload))


def unpacked(message: bytes) -> list[Frame]:
    """Returns the frames of a gRPC message.

    Raises:
        MalformedError: the message is not made of frames.
    """
    frames, whole, at = [], memoryview(message), 0
    while at < len(message) or not frames:
        frame, at = _first_of(whole, at)
        frames.append(frame)
    return frames


def _first_of(message: memoryview, at: int) -> tuple[Frame, int]:
    begin = at + HEADER_BYTES
    if len(message) < begin:
        raise MalformedError("a frame ends within its header")
    magic, version, kind, *fields, length, checksum = _HEADER.unpack_from(message, at)
    if magic != MAGIC:
        raise MalformedError("no frame of a star")
    if version != VERSION:
        raise MalformedError(f"frames of version {version}; this side has {VERSION}")
    payload = message[begin : begin + length]
    if length > MOST_BYTES or len(payload) < length:
        raise MalformedError(f"a frame of {length} bytes, of which {len(payload)} are there")
    if zlib.crc32(payload) != checksum:
        raise MalformedError("the checksum of a frame is wrong")
    return _checked(kind, payload, *fields, checksum), begin + length


def _checked(kind: int, payload: memoryview, *fields: int) -> Frame:
    try:
        frame = Frame(Kind(kind), payload, *fields)
    except ValueError:
        raise MalformedError(f"a frame of kind {kind}") from None
    end = frame.offset + len(payload)
    if end > (frame.total if frame.kind in DATA else max(frame.total, len(payload))):
        raise MalformedError("a frame that says what cannot be")
    if frame.kind in DATA and not len(payload):
        raise MalformedError("a part of a message without bytes")
    return frame


def chunk_bytes(total: int) -> int:
    """Returns the bytes of a message's parts, as equal as can be, the same on all sites.

    The hub relays short parts while the next are under way. Parts of long messages are longer, as
    each part costs some work.
    """
    count = -(-total // max(_LEAST_CHUNK, min(MOST_BYTES, total // 32)))
    return -(-total // count // _ALIGNED) * _ALIGNED


def growing_chunk_bytes(offset: int) -> int:
    """Returns the bytes of the part at `offset` of a message that the hub sends to several sites.

    The line out of the hub is busy from the first part on, which therefore is short. While the hub
    sends a part to all, one that is twice as long comes in.
    """
    return min(MOST_BYTES, offset + _FIRST_CHUNK)


_LONGEST_INSTANCE, _LONGEST_NAME = 64, 63
_LONGEST_HELLO = 1 << 16


@dataclass(frozen=True)
class Hello:
    """The greeting of a site.

    Attributes:
        instance: random identifier of its process.
        run: number of the run that it is in; 0 if in none.
        heard: number of the last frame that it has received.
        after: number of the run from which it goes on with some of the sites; 0 to begin anew.
        sites: names of the sites that go on, in rank order.
    """

    instance: str
    run: int = 0
    heard: int = 0
    after: int = 0
    sites: Sequence[str] = ()

    def frame(self) -> Frame:
        """Returns the greeting as a frame."""
        return Frame(Kind.HELLO, json.dumps(vars(self)).encode())

    @staticmethod
    def of(frame: Frame) -> Hello:
        """Reads a greeting from a frame.

        Raises:
            MalformedError: it is no greeting.
        """
        if len(frame.payload) > _LONGEST_HELLO:
            raise MalformedError(f"a greeting of {len(frame.payload)} bytes")
        try:
            told = json.loads(bytes(frame.payload))
            hello = Hello(**told)
        except (ValueError, TypeError, RecursionError):
            raise MalformedError("a greeting that cannot be read") from None
        numbers = (hello.run, hello.heard, hello.after)
        is_known = isinstance(hello.instance, str) and 0 < len(hello.instance) <= _LONGEST_INSTANCE
        is_list = isinstance(hello.sites, list) and all(isinstance(s, str) for s in hello.sites)
        if frame.kind != Kind.HELLO or not (is_known and is_list):
            raise MalformedError("a stream that does not begin with a greeting")
        if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            raise MalformedError("a greeting with numbers out of range")
        if any(
            not 0 < len(name) <= _LONGEST_NAME or not name.isprintable() for name in hello.sites
        ):
            raise MalformedError("a greeting with names that no site has")
        if len(set(hello.sites)) < len(hello.sites):
            raise MalformedError("a greeting that names a site twice")
        return hello


@dataclass(frozen=True)
class Welcome:
    """The greeting of the hub, which answers that of a site.

    Attributes:
        run: number of the run that the site is in.
        rank: of the site.
        names: of all sites, in rank order.
        heard: number of the last frame that the hub has received from the site.
        grace_s: seconds that a site may be away.
        epoch: number of earlier runs that this one continues.
    """

    run: int
    rank: int
    names: Sequence[str]
    heard: int
    grace_s: float
    epoch: int = 0

    def frame(self) -> Frame:
        """Returns the greeting as a frame."""
        return Frame(Kind.WELCOME, json.dumps(vars(self)).encode())

    @staticmethod
    def of(frame: Frame) -> Welcome:
        """Reads a greeting from a frame."""
        return Welcome(**json.loads(bytes(frame.payload)))


class Questions:
    """The questions of one site; callers hold the lock of the line."""

    def __init__(self) -> None:
        self._last = 0
        self._answers: dict[int, bytes | None] = {}

    def count(self) -> int:
        """Returns a number that no other question of this site has."""
        self._last += 1
        return self._last

    def begin(self) -> int:
        """Begins a question; returns the number under which its answer is awaited."""
        number = self.count()
        self._answers[number] = None
        return number

    def take(self, frame: Frame) -> None:
        """Takes an answer; ignores it if no thread waits for it any more."""
        if frame.number in self._answers:
            self._answers[frame.number] = bytes(frame.payload)

    def is_answered(self, number: int) -> bool:
        """True if the answer has come."""
        return self._answers[number] is not None

    def end(self, number: int) -> bytes | None:
        """Ends a question; returns its answer, or None if it has not come."""
        return self._answers.pop(number)


@dataclass(frozen=True)
class Place:
    """The identity of a collective, the same on all sites.

    Attributes:
        kind: kind of its messages.
        lane: each lane has its own order.
        number: index of the collective in its lane.
        dtype: of a sum, as an index into `sums.DTYPES`.
    """

    kind: Kind
    lane: int
    number: int
    dtype: int = 0


class Stream:
    """One stream of a line, which another replaces when it ends."""

    def __init__(self) -> None:
        self.is_welcome = False
        """True if the hub has answered."""
        self.is_over = False
