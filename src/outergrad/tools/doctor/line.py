"""TCP connection between two sites: opened from both sides, with its delay and rates measured."""

from __future__ import annotations

import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outergrad.tools.doctor.sites import Site

CONNECT_S = 5.0
"""Longest time for a connection."""

STEP_S = 8.0
"""Longest time without a byte while measuring."""

MOST_BYTES = 64 << 20
"""Largest size of one message."""

_PINGS, _PINGS_S = 12, 1.5
_FIRST_BYTES, _GROWTH = 4096, 4
_ENOUGH_S = 0.25
_ENOUGH_DELAYS, _MOST_DELAYS_S = 5, 1.5
"""Round trips after which a message has outlasted TCP's slow start, and a limit in seconds."""

_LENGTH = struct.Struct("!Q")
_ZEROS = memoryview(bytes(1 << 18))


@dataclass(frozen=True)
class Rates:
    """Rates of a connection, in bits of payload per second; first from the lower rank."""

    # One way at a time.
    alone: float
    alone_back: float
    # Both ways at once.
    both: float
    both_back: float

    @property
    def slowest(self) -> float:
        """Rate of the slower direction under training, which sends both ways at once."""
        return min(self.both, self.both_back)


def listen(address: str) -> socket.socket:
    """Listens at an address, on a port that the system chooses, as gloo does.

    Raises:
        OSError: There is no such address here.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=16)


def connect(
    listener: socket.socket, me: Site, other: Site, token: str
) -> tuple[socket.socket | None, str | None]:
    """Connects two sites from both sides, since firewalls may let only one direction pass.

    Both must call it at about the same time. The token identifies connections of this run.

    Returns:
        A connection to measure on, or None; the reason why this site could not open one, or None.
    """
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(_accept, listener, f"{token} {other.rank} {me.rank}\n".encode())
        called = pool.submit(_call, other, f"{token} {me.rank} {other.rank}\n".encode())
        incoming, (outgoing, why) = accepted.result(), called.result()
    # Both sites must keep the same connection of two: the one that the higher rank has opened.
    first, second = (incoming, outgoing) if me.rank < other.rank else (outgoing, incoming)
    if first and second:
        second.close()
    if line := first or second:
        line.settimeout(STEP_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line, why


def _call(other: Site, hello: bytes) -> tuple[socket.socket | None, str | None]:
    """Opened connection to a site, or the reason why there is none."""
    try:
        line = socket.create_connection((other.address, other.port), timeout=CONNECT_S)
    except ConnectionRefusedError:
        return None, "refused"
    except TimeoutError:
        return None, "no answer"
    except OSError as error:
        return None, (error.strerror or str(error)).lower()
    with suppress(OSError):
        line.sendall(hello)
        if _receive(line, len(hello)) == hello:
            return line, None
    line.close()
    return None, "connected, but no answer"


def _accept(listener: socket.socket, hello: bytes) -> socket.socket | None:
    """Connection from the other site; those without its token are closed."""
    until_s = time.monotonic() + CONNECT_S
    while (left_s := until_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            line, _ = listener.accept()
        except OSError:
            return None
        line.settimeout(min(1.0, left_s))
        with suppress(OSError):
            if _receive(line, len(hello)) == hello:
                line.sendall(hello)
                return line
        line.close()
    return None


def measure(line: socket.socket, *, lower: bool) -> tuple[float, Rates]:
    """Measures the connection with the site at the other end, which must do the same.

    Takes some seconds, also on slow links. `lower` is True at the site of the lower rank.

    Returns:
        Seconds of a round trip; rates.

    Raises:
        OSError: The other site stopped.
    """
    rtt_s = _round_trip_s(line, asks=lower)
    enough_s = _ENOUGH_S + min(_ENOUGH_DELAYS * rtt_s, _MOST_DELAYS_S)
    alone = _send_growing(line, enough_s) if lower else _receive_growing(line)
    alone_back = _receive_growing(line) if lower else _send_growing(line, enough_s)
    # Twice the time needed at these rates, since both directions do not begin at once.
    sizes = [
        int(min(MOST_BYTES, max(_FIRST_BYTES, rate / 8 * 2 * enough_s)))
        for rate in (alone, alone_back)
    ]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(_send, line, sizes[not lower])
        _, received = _timed(line, sizes[lower])
        sending.result()
    _tell(line, received)
    sent = float(_hear(line))
    both, both_back = (sent, received) if lower else (received, sent)
    return rtt_s, Rates(alone, alone_back, both, both_back)


def _round_trip_s(line: socket.socket, *, asks: bool) -> float:
    """Shortest of several round trips, measured by the site that asks and sent to the other."""
    while not asks:
        if _receive(line, 1) != b"?":
            return float(_hear(line))
        line.sendall(b"!")
    until_s = time.perf_counter() + _PINGS_S
    found_s: list[float] = []
    while len(found_s) < 2 or (len(found_s) < _PINGS and time.perf_counter() < until_s):
        began_s = time.perf_counter()
        line.sendall(b"?")
        _receive(line, 1)
        found_s.append(time.perf_counter() - began_s)
    line.sendall(b".")
    _tell(line, min(found_s))
    return min(found_s)


def _send_growing(line: socket.socket, enough_s: float) -> float:
    """Rate of the first message, among ever longer ones, that takes long enough to be reliable."""
    nbytes, took_s, rate = _FIRST_BYTES // _GROWTH, 0.0, 0.0
    while took_s < enough_s and nbytes < MOST_BYTES:
        nbytes *= _GROWTH
        line.sendall(_LENGTH.pack(nbytes))
        _send(line, nbytes)
        took_s, rate = _hear(line)
    line.sendall(_LENGTH.pack(0))
    return rate


def _receive_growing(line: socket.socket) -> float:
    rate = 0.0
    while nbytes := _receive_length(line):
        took_s, rate = _timed(line, nbytes)
        _tell(line, [took_s, rate])
    return rate


def _send(line: socket.socket, nbytes: int) -> None:
    for begin in range(0, nbytes, len(_ZEROS)):
        line.sendall(_ZEROS[: nbytes - begin])


def _timed(line: socket.socket, nbytes: int) -> tuple[float, float]:
    """Seconds to receive a message, and the rate of its second half, in bits per second.

    The first half is subject to TCP's slow start, and to the burst that a link admits after a
    pause.
    """
    piece = bytearray(len(_ZEROS))
    began_s = now_s = half_s = time.perf_counter()
    got = half = 0
    while got < nbytes:
        got += _some(line, memoryview(piece)[: nbytes - got])
        now_s = time.perf_counter()
        if 2 * got <= nbytes or not half:
            half, half_s = got, now_s
    if got == half or now_s <= half_s:
        return now_s - began_s, 8 * nbytes / max(now_s - began_s, 1e-6)
    return now_s - began_s, 8 * (got - half) / (now_s - half_s)


def _tell(line: socket.socket, value: Any) -> None:
    text = json.dumps(value).encode()
    line.sendall(_LENGTH.pack(len(text)) + text)


def _hear(line: socket.socket) -> Any:
    return json.loads(_receive(line, _receive_length(line)))


def _receive_length(line: socket.socket) -> int:
    return _LENGTH.unpack(_receive(line, _LENGTH.size))[0]


def _receive(line: socket.socket, nbytes: int) -> bytes:
    """Exactly `nbytes` bytes; raises OSError if the other site has closed or sends nothing."""
    left = memoryview(got := bytearray(nbytes))
    while left:
        left = left[_some(line, left) :]
    return bytes(got)


def _some(line: socket.socket, into: memoryview) -> int:
    if count := line.recv_into(into):
        return count
    raise ConnectionError("the other site has closed the connection")
