"""Links between the sites: measurement of each pair over TCP, and findings from the figures."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from typing import Any

from outergrad._amounts import amount, seconds, times
from outergrad.tools.doctor.findings import Finding, note, ok, problem
from outergrad.tools.doctor.meeting import Board, Roll, Site, Tell

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


ROUND_S = 30.0
"""Longest time that a site waits for other pairs to finish."""

_ASYMMETRIC = 2.0
_SHARED = 0.7
_FAST_BIT_PER_S = 2e9
"""Rate above which the measurement is limited by the processors."""

_LONG_RTT_S = 0.2
_PARAMETERS = 10_000_000

_BLOCKED = "let TCP connections between the sites pass, on all ports from 1024, both ways"
_STOPPED = "look at that site's terminal: a process that was stopped, or a lost network"

rate = partial(amount, unit="bit/s", write=times)
"""Formats a rate, e.g. ``9.6 Mbit/s``."""

_Pair = tuple[int, int]


@dataclass(frozen=True)
class Measured:
    """Measurements of the link between two ranks."""

    lower: int
    higher: int
    rtt_s: float = 0.0
    rates: Rates | None = None  # None if nothing was measured
    failures: tuple[str, ...] = ()  # sentences for the user

    def __str__(self) -> str:
        return f"sites {self.lower} and {self.higher}"


def rounds(ranks: Sequence[int], *, together: bool) -> list[list[_Pair]]:
    """Returns all pairs, in rounds in which no site occurs twice, or one pair per round.

    Pairs measured at once would disturb each other if sites share a machine.
    """
    if not together:
        return [[pair] for pair in combinations(ranks, 2)]
    seats: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    half, found = len(seats) // 2, []
    for _ in seats[1:]:
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats.insert(1, seats.pop())
    return found


def measure_pairs(board: Board, listener: socket.socket, roll: Roll, tell: Tell) -> list[int]:
    """Measures this site's pairs in their rounds, and posts the results.

    Returns:
        The ranks of sites that did not come to the next round.
    """
    sites = {site.rank: site for site in roll.sites}
    course = rounds(roll.ranks, together=len(roll.machines) == len(sites))
    for number, pairs in enumerate(course):
        board.post(f"round-{number}/{board.rank}", "here")
        if silent := board.wait(f"round-{number}", roll.ranks, ROUND_S, tell):
            return silent
        shown = ", ".join(f"{a} and {b}" for a, b in pairs)
        tell(f"measuring the link of sites {shown} ({number + 1} of {len(course)})")
        for a, b in pairs:
            if board.rank in (a, b):
                other = sites[a + b - board.rank]
                found = _measure(listener, sites[board.rank], other, roll.token)
                board.post(f"pair/{a}-{b}/{board.rank}", found)
    board.post(f"measured/{board.rank}", "done")
    return board.wait("measured", roll.ranks, ROUND_S, tell)


def _measure(listener: socket.socket, me: Site, other: Site, token: str) -> dict[str, Any]:
    line, why = connect(listener, me, other, token)
    if line is None:
        return {"outgoing": why}
    with line:
        try:
            rtt_s, rates = measure(line, lower=me.rank < other.rank)
        except (OSError, ValueError) as error:
            return {"outgoing": why, "stopped": str(error)}
    return {"outgoing": why, "rtt_s": rtt_s, "rates": asdict(rates)}


def measured(board: Board, roll: Roll) -> list[Measured]:
    """Returns the links, combined from the notes of both sites of each pair."""
    addresses = {site.rank: f"{site.address}:{site.port}" for site in roll.sites}
    return [
        combine(pair, board.read_all(f"pair/{pair[0]}-{pair[1]}", pair), addresses)
        for pair in combinations(roll.ranks, 2)
    ]


def combine(
    pair: _Pair, told: Mapping[int, dict[str, Any]], addresses: Mapping[int, str]
) -> Measured:
    """Returns the link of a pair, from the notes of its sites; addresses are by rank."""
    failures = []
    for rank, other in (pair, pair[::-1]):
        found = told.get(rank, {})
        if why := found.get("outgoing"):
            failures.append(
                f"site {rank} cannot connect to site {other} at {addresses[other]}: {why}"
            )
        if "stopped" in found:
            failures.append(f"site {other} stopped answering site {rank} while they measured")
    figures = next((found for found in told.values() if "rates" in found), None)
    if figures is None:
        return Measured(*pair, failures=tuple(failures))
    return Measured(*pair, figures["rtt_s"], Rates(**figures["rates"]), tuple(failures))


def check_links(links: Sequence[Measured], sites: int, *, rehearsal: bool) -> Iterator[Finding]:
    """Yields problems of the links, and what their rates mean for training.

    A rehearsal, with sites on one machine, yields nothing about a network.
    """
    for failure in (failure for link in links for failure in link.failures):
        yield problem("links", failure, _STOPPED if "stopped" in failure else _BLOCKED)
    if unmeasured := [link for link in links if not (link.rates or link.failures)]:
        pairs = ", ".join(f"{link.lower} and {link.higher}" for link in unmeasured)
        yield note("links", f"not measured: sites {pairs}")
    timed = [(link, link.rates) for link in links if link.rates]
    if timed and rehearsal:
        yield note("links", "between processes of one machine: no link of a network was measured")
    elif timed:
        for link, rates in timed:
            yield from _peculiar(link, rates)
        yield from _summed_up(timed, sites)


def _peculiar(link: Measured, rates: Rates) -> Iterator[Finding]:
    slow, fast = sorted((rates.alone, rates.alone_back))
    if fast > _ASYMMETRIC * slow and slow < _FAST_BIT_PER_S:
        forth = rates.alone == slow
        sender, other = (link.lower, link.higher) if forth else (link.higher, link.lower)
        said = f"site {sender} sends {fast / slow:.1f} times slower than it receives, to and from "
        said += f"site {other}"
        yield note("links", said, "every step waits for the slower way: count on that")
    alone, both = slow + fast, rates.both + rates.both_back
    if alone < _FAST_BIT_PER_S and both < _SHARED * alone:
        said = f"{link}: both ways at once carry {rate(both)} in all, one at a time {rate(slow)}: "
        said += "they share one channel, as Wi-Fi and some VPNs do"
        yield note("links", said, "a cable instead of Wi-Fi may double the rate")
    if link.rtt_s > _LONG_RTT_S:
        said = f"{link}: {1e3 * link.rtt_s:.0f} ms there and back, in every step at least once"
        yield note("links", said, "og.LocalSteps(k) exchanges every k steps alone")


def _summed_up(timed: Sequence[tuple[Measured, Rates]], sites: int) -> Iterator[Finding]:
    slowest, rates = min(timed, key=lambda pair: pair[1].slowest)
    rtt_s = max(link.rtt_s for link, _ in timed)
    said = f"{rate(rates.slowest)} between {slowest}" + (", the slowest" if len(timed) > 1 else "")
    yield ok("links", said)
    step_s = ddp_step_s(_PARAMETERS, sites, rates.slowest, rtt_s)
    step = f"a step of DDP with 10 million parameters spends {seconds(step_s, times)} there"
    option = rate(rates.slowest).replace(" ", "").removesuffix("/s").lower().replace(",", "")
    latency = f"{1e3 * rtt_s:.{1 if rtt_s < 0.01 else 0}f}ms"
    hint = f"`outergrad plan --link {option} --latency {latency}` shows what pays"
    yield note("meaning", step, hint)


def ddp_step_s(parameters: int, sites: int, rate_bit_per_s: float, rtt_s: float) -> float:
    """Returns the seconds of DDP's ring all-reduce of a float32 gradient on such links."""
    hops = 2 * (sites - 1)
    return hops * (32 * parameters / sites / rate_bit_per_s + rtt_s / 2)
