"""Frames: what travels between a site and the hub, and nothing that needs a pickle to be read."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

MAGIC, VERSION = b"OGST", 1
MOST_BYTES = 1 << 20
"""Of the payload of a frame."""
MOST_MESSAGE_BYTES = MOST_BYTES + (1 << 16)
"""Of the frames that travel as one message of gRPC."""
LANES = 8
ALL = 0xFFFF
"""In the place of a recipient, whoever it is for; in that of a sender, the hub."""

_HEADER = struct.Struct("!4sBBBBQQQHHQQII")
HEADER_BYTES = _HEADER.size
_LEAST_CHUNK, _FIRST_CHUNK, _ALIGNED = 1 << 16, 1 << 14, 64


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """A site's first on a stream: which process it is, and how far it has heard."""
    WELCOME = 2
    """The hub's first: rank, sites, and how far it has heard."""
    ACK = 3
    """How far the other side has been heard, and what may be sent."""
    READY = 4
    """All sites are there."""
    GATHER = 5
    """For all other sites."""
    EACH = 6
    """For one other site."""
    SUM = 7
    """To be added up; what comes back is the sum."""
    TEXT = 8
    """Left for all other sites, under a name."""
    GONE = 9
    """The sender leaves, or is lost."""
    FAULT = 10
    """The run cannot go on, and why."""
    FIRST = 11
    """To be written on the board, unless something stands there."""
    PUT = 12
    """To be written on the board, over what stands there."""
    GET = 13
    """Asks what stands on the board."""
    ANSWER = 14
    """What stands on the board then; `number` is that of the question."""
    PART = 15
    """The sender took part in some steps: for the log."""
    INVITED = 16
    """Those that train take the site in: their run, and who takes part then."""


UNNUMBERED = frozenset({Kind.HELLO, Kind.WELCOME, Kind.ACK})
"""Not repeated where a stream breaks, and so without a number in its order."""
DATA = frozenset({Kind.GATHER, Kind.EACH, Kind.SUM})


class MalformedError(ValueError):
    """Bytes are not what a site, or the hub, sends."""


class Frame(NamedTuple):
    """A message, or a chunk of one.

    Attributes:
        kind: what it is.
        payload: at most `MOST_BYTES`.
        lane: of the collective; each has its own order.
        dtype: of a sum, as in `sums.DTYPES`.
        run: which the sites have agreed on by the hub.
        sequence: counts the frames from this side to the other.
        number: of the collective in its lane.
        sender: rank of a site.
        recipient: rank of a site.
        offset: of the payload in the whole message, bytes.
        total: bytes of the whole message.
        checksum: of the payload, where it is known.
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
        """As it travels."""
        return packed([self])

    def header(self) -> bytes:
        """What stands before the payload."""
        checksum = zlib.crc32(self.payload) if self.checksum is None else self.checksum
        return _HEADER.pack(
            *(MAGIC, VERSION, self.kind, self.lane, self.dtype, self.run, self.sequence),
            *(self.number, self.sender, self.recipient, self.offset, self.total),
            *(len(self.payload), checksum),
        )


def packed(frames: Iterable[Frame]) -> bytes:
    """A message of gRPC."""
    return b"".join(part for frame in frames for part in (frame.header(), frame.payload))


def unpacked(message: bytes) -> list[Frame]:
    """The frames of a message of gRPC.

    Raises:
        MalformedError: it is not made of frames.
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
    if frame.lane >= LANES or frame.offset + len(payload) > max(frame.total, len(payload)):
        raise MalformedError("a frame that says what cannot be")
    if frame.kind in DATA and not len(payload):
        raise MalformedError("a part of a message without bytes")
    return frame


def chunk_bytes(total: int) -> int:
    """How long the parts of a message are, as equal as can be; the same on all sites.

    Short ones travel on while the next are under way; of long messages they are longer, as each
    costs some work.
    """
    count = -(-total // max(_LEAST_CHUNK, min(MOST_BYTES, total // 32)))
    return -(-total // count // _ALIGNED) * _ALIGNED


def growing_chunk_bytes(offset: int) -> int:
    """How long a part is of a message that leaves the hub several times as often as it comes.

    The line out of the hub is busy from the first part on, which therefore is short. While it
    sends a part to all, one that is twice as long comes in.

    Args:
        offset: of the part.
    """
    return min(MOST_BYTES, offset + _FIRST_CHUNK)
