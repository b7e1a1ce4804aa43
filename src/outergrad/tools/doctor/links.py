"""Links between the sites: measurement of each pair over TCP, and findings from the figures."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedRWPair
from itertools import chain, combinations
from typing import Any

from outergrad._amounts import amount, seconds, times
from outergrad.comm.cost import Collective, RingCost, waits_of
from outergrad.core.addresses import Address, listen_at
from outergrad.tools.doctor.findings import Finding, note, ok, problem
from outergrad.tools.doctor.meeting import Board, Roll, Site, UnmetError

CONNECT_S = 5.0  # longest time for a connection
STEP_S = 8.0  # longest time without a byte while measuring
ROUND_S = 30.0  # longest time that a site waits for other pairs to finish
MOST_BYTES = 64 << 20  # largest size of one message

_PINGS = 8
_FIRST_BYTES, _GROWTH = 4096, 4
_ENOUGH_S = 0.25
# Round trips after which a message has outlasted TCP's slow start, and a limit in seconds.
_ENOUGH_DELAYS, _MOST_DELAYS_S = 5, 1.5
_ZEROS = memoryview(bytes(1 << 18))
_REASONS = {ConnectionRefusedError: "refused", TimeoutError: "no answer"}

_ASYMMETRIC = 2.0
_SHARED = 0.7
_FAST_BIT_PER_S = 2e9  # above it, the measurement is limited by the processors
_LONG_RTT_S = 0.2
_PARAMETERS = 10_000_000

_Pair = tuple[int, int]
rate = partial(amount, unit="bit/s", write=times)
"""Formats a rate, e.g. ``9.6 Mbit/s``."""


@dataclass(frozen=True)
class Measured:
    """Measurements of the link between two ranks; no figures if nothing could be measured.

    Rates are in bits of payload per second, first that from the lower rank to the higher.
    """

    lower: int
    higher: int
    rtt_s: float = 0.0
    alone: float = 0.0  # one way at a time
    alone_back: float = 0.0
    both: float = 0.0  # both ways at once
    both_back: float = 0.0
    failures: Sequence[str] = ()  # sentences for the user

    def __str__(self) -> str:
        return f"sites {self.lower} and {self.higher}"

    @property
    def slowest(self) -> float:
        """Rate of the slower direction under training, which sends both ways at once."""
        return min(self.both, self.both_back)


def listen(address: str) -> socket.socket:
    """Listens at an address, on a port that the system chooses, as gloo does."""
    try:
        return listen_at(address)
    except OSError as error:
        said = f"cannot listen at {address}: {os.strerror(error.errno or 0)}"
        remedy = "choose another interface with GLOO_SOCKET_IFNAME"
        raise UnmetError(said, remedy, "interface") from error


def connect(
    listener: socket.socket, me: Site, other: Site, token: str
) -> tuple[socket.socket | None, str | None]:
    """Connects two sites from both sides, since firewalls may let only one direction pass.

    Returns a connection to measure on, if any, and the reason why this site could not open one.
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
    except OSError as error:
        return None, _REASONS.get(type(error)) or (error.strerror or str(error)).lower()
    with suppress(OSError):
        line.sendall(hello)
        if _hears(line, hello):
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
            if _hears(line, hello):
                line.sendall(hello)
                return line
        line.close()
    return None


def _hears(line: socket.socket, hello: bytes) -> bool:
    # Without a buffer, which could take more than the greeting.
    with line.makefile("rb", buffering=0) as file:
        return file.readline(len(hello)) == hello


def measure(line: socket.socket, *, lower: bool) -> dict[str, float]:
    """Measures the connection with the site at the other end, which must do the same.

    Returns the figures of `Measured`, after some seconds, also on slow links. Raises OSError if the
    other site stops. `lower` is True at the site of the lower rank.
    """
    with line.makefile("rwb") as file, ThreadPoolExecutor(1) as pool:
        rtt_s = _round_trip_s(file, asks=lower)
        enough_s = _ENOUGH_S + min(_ENOUGH_DELAYS * rtt_s, _MOST_DELAYS_S)
        alone = _one_way(file, enough_s, sends=lower)
        alone_back = _one_way(file, enough_s, sends=not lower)
        # Twice the time needed at these rates, since both directions do not begin at once.
        forth_bytes, back_bytes = [
            int(min(MOST_BYTES, max(_FIRST_BYTES, rate / 8 * 2 * enough_s)))
            for rate in (alone, alone_back)
        ]
        sending = pool.submit(_send, file, forth_bytes if lower else back_bytes)
        _, received = _receive(file, back_bytes if lower else forth_bytes)
        sending.result()
        _tell(file, received)
        sent = _hear(file)
    both, both_back = (sent, received) if lower else (received, sent)
    figures = {"rtt_s": rtt_s, "alone": alone, "alone_back": alone_back}
    return {**figures, "both": both, "both_back": both_back}


def _round_trip_s(file: BufferedRWPair, *, asks: bool) -> float:
    """Shortest of several round trips, measured by the site that asks and told to the other."""
    if not asks:
        for _ in range(_PINGS):
            _tell(file, _hear(file))
        return _hear(file)
    found_s = []
    for _ in range(_PINGS):
        began_s = time.perf_counter()
        _tell(file, "?")
        _hear(file)
        found_s.append(time.perf_counter() - began_s)
    _tell(file, min(found_s))
    return min(found_s)


def _one_way(file: BufferedRWPair, enough_s: float, *, sends: bool) -> float:
    """Rate of the first message, among ever longer ones, that takes long enough to be reliable."""
    nbytes, took_s, rate = _FIRST_BYTES // _GROWTH, 0.0, 0.0
    while took_s < enough_s and nbytes < MOST_BYTES:
        nbytes *= _GROWTH
        if sends:
            _send(file, nbytes)
            took_s, rate = _hear(file)
        else:
            took_s, rate = _receive(file, nbytes)
            _tell(file, [took_s, rate])
    return rate


def _send(file: BufferedRWPair, nbytes: int) -> None:
    for begin in range(0, nbytes, len(_ZEROS)):
        file.write(_ZEROS[: nbytes - begin])
    file.flush()


def _receive(file: BufferedRWPair, nbytes: int) -> tuple[float, float]:
    """Seconds to receive a message, and the rate of its second half, in bits per second."""
    # The first half is subject to TCP's slow start, and to the burst that a link admits at first.
    piece = memoryview(bytearray(len(_ZEROS)))
    got = half = 0
    began_s = now_s = half_s = 0.0
    while got < nbytes:
        got += file.readinto1(piece[: nbytes - got]) or _closed()
        now_s = time.perf_counter()
        began_s = began_s or now_s  # until then, the other site may have been busy
        if 2 * got <= nbytes or not half:
            half, half_s = got, now_s
    if got == half or now_s <= half_s:
        half, half_s = 0, began_s
    return now_s - began_s, 8 * (got - half) / max(now_s - half_s, 1e-6)


def _tell(file: BufferedRWPair, value: Any) -> None:
    file.write(json.dumps(value).encode() + b"\n")
    file.flush()


def _hear(file: BufferedRWPair) -> Any:
    return json.loads(file.readline() or _closed())


def _closed() -> Any:
    raise ConnectionError("the other site has closed the connection")


def rounds(ranks: Sequence[int], *, together: bool) -> list[list[_Pair]]:
    """Returns all pairs, in rounds in which no site occurs twice, or one pair per round.

    Pairs measured at once would disturb each other if sites share a machine.
    """
    if not together:
        return [[pair] for pair in combinations(ranks, 2)]
    count = len(ranks) - 1 + len(ranks) % 2
    found: list[list[_Pair]] = [[] for _ in range(count)]
    for (i, lower), (j, higher) in combinations(enumerate(ranks), 2):
        # Each site but the last of an even number would meet itself once; then it meets the last.
        number = i + j if j < count else 2 * i
        found[number % count].append((lower, higher))
    return found


def measure_pairs(board: Board, listener: socket.socket, roll: Roll) -> list[int]:
    """Measures this site's pairs in their rounds, and posts what `measured` reads.

    Returns the ranks of sites that did not come to the next round.
    """
    sites = {site.rank: site for site in roll.sites}
    course = rounds(roll.ranks, together=len(roll.machines) == len(sites))
    for number, pairs in enumerate(course):
        board.post(f"round-{number}/{board.rank}", "here")
        if silent := board.wait(f"round-{number}", roll.ranks, ROUND_S):
            return silent
        shown = ", ".join(f"{a} and {b}" for a, b in pairs)
        board.tell(f"measuring the link of sites {shown} ({number + 1} of {len(course)})")
        for a, b in pairs:
            if board.rank in (a, b):
                me, other = sites[board.rank], sites[a + b - board.rank]
                found = _measure(listener, me, other, roll.token)
                board.post(f"pair/{a}-{b}/{me.rank}", found)
    board.post(f"measured/{board.rank}", "done")
    return board.wait("measured", roll.ranks, ROUND_S)


def _measure(listener: socket.socket, me: Site, other: Site, token: str) -> dict[str, Any]:
    """Figures and failures of the link to another site, as far as this site knows them."""
    line, why = connect(listener, me, other, token)
    failures, figures = [], {}
    if why:
        place = f"site {other.rank} at {Address(other.address, other.port)}"
        failures.append(f"site {me.rank} cannot connect to {place}: {why}")
    if line:
        try:
            with line:
                figures = measure(line, lower=me.rank < other.rank)
        except (OSError, ValueError):
            said = f"site {other.rank} stopped answering site {me.rank} while they measured"
            failures.append(said)
    return {"figures": figures, "failures": failures}


def measured(board: Board, roll: Roll) -> list[Measured]:
    """Returns the links, combined from the notes of both sites of each pair."""
    links = []
    for pair in combinations(roll.ranks, 2):
        told = board.read_all("pair/{}-{}".format(*pair), pair).values()
        failures = [failure for found in told for failure in found["failures"]]
        figures = next((found["figures"] for found in told if found["figures"]), {})
        links.append(Measured(*pair, **figures, failures=failures))
    return links


def check_links(links: Sequence[Measured], sites: int, *, rehearsal: bool) -> Iterator[Finding]:
    """Reports problems of the links, and, but for a rehearsal, what they mean for training."""
    for failure in chain.from_iterable(link.failures for link in links):
        remedy = "let TCP connections between the sites pass, on all ports from 1024, both ways"
        if "stopped" in failure:
            remedy = "look at that site's terminal: a process that was stopped, or a lost network"
        yield problem("links", failure, remedy)
    if unmeasured := [link for link in links if not (link.rtt_s or link.failures)]:
        pairs = ", ".join(f"{link.lower} and {link.higher}" for link in unmeasured)
        yield note("links", f"not measured: sites {pairs}")
    timed = [link for link in links if link.rtt_s]
    if timed and rehearsal:
        yield note("links", "between processes of one machine: no link of a network was measured")
    elif timed:
        yield from chain.from_iterable(map(_check_link, timed))
        yield from _summed_up(timed, sites)


def _check_link(link: Measured) -> Iterator[Finding]:
    slow, fast = sorted((link.alone, link.alone_back))
    if fast > _ASYMMETRIC * slow and slow < _FAST_BIT_PER_S:
        forth = link.alone == slow
        sender, other = (link.lower, link.higher) if forth else (link.higher, link.lower)
        said = f"site {sender} sends {fast / slow:.1f} times slower than it receives, to and from "
        said += f"site {other}"
        yield note("links", said, "every step waits for the slower way: count on that")
    alone, both = slow + fast, link.both + link.both_back
    if alone < _FAST_BIT_PER_S and both < _SHARED * alone:
        said = f"{link}: both ways at once carry {rate(both)} in all, one at a time {rate(slow)}: "
        said += "they share one channel, as Wi-Fi and some VPNs do"
        yield note("links", said, "a cable instead of Wi-Fi may double the rate")
    if link.rtt_s > _LONG_RTT_S:
        said = f"{link}: {1e3 * link.rtt_s:.0f} ms there and back, in every step at least once"
        yield note("links", said, "og.LocalSteps(k) exchanges every k steps alone")


def _summed_up(timed: Sequence[Measured], sites: int) -> Iterator[Finding]:
    slowest = min(timed, key=lambda link: link.slowest)
    rtt_s = max(link.rtt_s for link in timed)
    said = f"{rate(slowest.slowest)} between {slowest}"
    yield ok("links", said + (", the slowest" if len(timed) > 1 else ""))
    step_s = ddp_step_s(_PARAMETERS, sites, slowest.slowest, rtt_s)
    step = f"a step of DDP with 10 million parameters spends {seconds(step_s, times)} there"
    option = rate(slowest.slowest).replace(" ", "").removesuffix("/s").lower().replace(",", "")
    latency = f"{1e3 * rtt_s:.{1 if rtt_s < 0.01 else 0}f}ms"
    hint = f"`outergrad plan --link {option} --latency {latency}` shows what pays"
    yield note("meaning", step, hint)


def ddp_step_s(parameters: int, sites: int, rate_bit_per_s: float, rtt_s: float) -> float:
    """Returns the seconds of DDP's ring all-reduce of a float32 gradient on such links."""
    ring = RingCost(sites)
    sent_bytes = ring.all_reduce(4 * parameters).sent
    return 8 * sent_bytes / rate_bit_per_s + waits_of(ring, Collective.ALL_REDUCE) * rtt_s / 2
