"""The delay and the rate of a connection, by short messages of growing length."""

from __future__ import annotations

import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from outergrad.tools.doctor.connect import receive

_PINGS = 12
_PINGS_S = 1.5
_FIRST_BYTES = 4096
_GROWTH = 4
MOST_BYTES = 64 << 20
"""Of one message."""

_ENOUGH_S = 0.25
_ENOUGH_DELAYS = 5
"""A message that took so many round trips has outlasted TCP's slow start."""

_MOST_DELAYS_S = 1.5
_PIECE_BYTES = 1 << 18
_ZEROS = memoryview(bytes(_PIECE_BYTES))


@dataclass(frozen=True)
class Rates:
    """What a connection carries, bits of payload per second.

    Attributes:
        alone: One way at a time, from the lower rank to the higher.
        alone_back: The other way.
        both: Both ways at once, from the lower rank to the higher.
        both_back: The other way.
    """

    alone: float
    alone_back: float
    both: float
    both_back: float

    @property
    def slowest(self) -> float:
        """What a step can count on: training sends both ways at once."""
        return min(self.both, self.both_back)


def measure(line: socket.socket, *, lower: bool) -> tuple[float, Rates]:
    """Measures with the site at the other end, which must do the same.

    Takes some seconds, on slow links too.

    Args:
        line: The connection.
        lower: Whether this site has the lower rank of the two.

    Returns:
        Seconds there and back; rates.

    Raises:
        OSError: The other site stopped.
    """
    rtt_s = _ping(line) if lower else _echo(line)
    alone = _send_growing(line, rtt_s) if lower else _receive_growing(line)
    alone_back = _receive_growing(line) if lower else _send_growing(line, rtt_s)
    mine, theirs = (alone, alone_back) if lower else (alone_back, alone)
    received = _both(line, _size(mine, rtt_s), _size(theirs, rtt_s))
    _tell(line, received)
    sent = float(_hear(line))
    both, both_back = (sent, received) if lower else (received, sent)
    return rtt_s, Rates(alone, alone_back, both, both_back)


def _ping(line: socket.socket) -> float:
    """The shortest way there and back of several."""
    until_s = time.perf_counter() + _PINGS_S
    found_s: list[float] = []
    while len(found_s) < 2 or (len(found_s) < _PINGS and time.perf_counter() < until_s):
        began_s = time.perf_counter()
        line.sendall(b"?")
        receive(line, 1)
        found_s.append(time.perf_counter() - began_s)
    line.sendall(b".")
    _tell(line, min(found_s))
    return min(found_s)


def _echo(line: socket.socket) -> float:
    while receive(line, 1) == b"?":
        line.sendall(b"!")
    return float(_hear(line))


def _send_growing(line: socket.socket, rtt_s: float) -> float:
    """Sends ever longer messages until one takes long enough to be believed."""
    size = _FIRST_BYTES
    while True:
        line.sendall(struct.pack("!Q", size))
        _send(line, size)
        took_s, rate = _hear(line)
        if took_s >= _enough_s(rtt_s) or size >= MOST_BYTES:
            break
        size *= _GROWTH
    line.sendall(struct.pack("!Q", 0))
    return rate


def _receive_growing(line: socket.socket) -> float:
    rate = 0.0
    while size := struct.unpack("!Q", receive(line, 8))[0]:
        took_s, rate = _receive(line, size)
        _tell(line, [took_s, rate])
    return rate


def _enough_s(rtt_s: float) -> float:
    return _ENOUGH_S + min(_ENOUGH_DELAYS * rtt_s, _MOST_DELAYS_S)


def _size(rate_bit_per_s: float, rtt_s: float) -> int:
    """Bytes that take twice long enough at a rate: the two ways do not begin at once."""
    return int(min(MOST_BYTES, max(_FIRST_BYTES, rate_bit_per_s / 4 * _enough_s(rtt_s))))


def _both(line: socket.socket, outgoing: int, incoming: int) -> float:
    """Sends and receives at once; the rate of what came."""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(_send, line, outgoing)
        _, rate = _receive(line, incoming)
        sending.result()
    return rate


def _send(line: socket.socket, nbytes: int) -> None:
    for _ in range(nbytes // _PIECE_BYTES):
        line.sendall(_ZEROS)
    line.sendall(_ZEROS[: nbytes % _PIECE_BYTES])


def _receive(line: socket.socket, nbytes: int) -> tuple[float, float]:
    """Seconds for a message, and the rate of its second half, in bits per second.

    The first half pays for TCP's slow start, and for what a link lets pass at once after a pause.
    """
    piece = bytearray(_PIECE_BYTES)
    began_s = now_s = half_s = time.perf_counter()
    got = half = 0
    while got < nbytes:
        count = line.recv_into(piece, min(_PIECE_BYTES, nbytes - got))
        if not count:
            raise ConnectionError("the other site has closed the connection")
        got += count
        now_s = time.perf_counter()
        if 2 * got <= nbytes or not half:
            half, half_s = got, now_s
    after = got - half
    if not after or now_s <= half_s:
        return now_s - began_s, 8 * nbytes / max(now_s - began_s, 1e-6)
    return now_s - began_s, 8 * after / (now_s - half_s)


def _tell(line: socket.socket, value: Any) -> None:
    text = json.dumps(value).encode()
    line.sendall(struct.pack("!Q", len(text)) + text)


def _hear(line: socket.socket) -> Any:
    return json.loads(receive(line, struct.unpack("!Q", receive(line, 8))[0]))
