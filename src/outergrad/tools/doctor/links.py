"""Links between the sites: measurement of each pair, and findings from the figures."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from typing import Any

from outergrad._amounts import amount, seconds, times
from outergrad.tools.doctor.board import Board, Tell
from outergrad.tools.doctor.findings import Finding, note, ok, problem
from outergrad.tools.doctor.line import Rates, connect, measure
from outergrad.tools.doctor.meeting import Roll
from outergrad.tools.doctor.sites import Site

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
