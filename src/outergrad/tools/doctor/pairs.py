"""Every pair of sites, one after another: whether they connect, and what the link carries."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outergrad.tools.doctor.board import Board
from outergrad.tools.doctor.bursts import Rates, measure
from outergrad.tools.doctor.connect import connect
from outergrad.tools.doctor.findings import named
from outergrad.tools.doctor.roll import Roll, Tell
from outergrad.tools.doctor.sites import Site

ROUND_S = 30.0
"""Longest time that a site waits for the others' pairs to be done."""

_Pair = tuple[int, int]


@dataclass(frozen=True)
class Measured:
    """What is known of the link between two sites.

    Attributes:
        lower: The lower rank of the two.
        higher: The higher one.
        rtt_s: Time there and back; None if it was not measured.
        rates: None if they were not measured.
        failures: In words, why not, or what did not work besides.
    """

    lower: int
    higher: int
    rtt_s: float | None = None
    rates: Rates | None = None
    failures: tuple[str, ...] = ()


def rounds(ranks: Sequence[int], *, together: bool) -> list[list[_Pair]]:
    """All pairs, in rounds in which no site appears twice.

    Args:
        ranks: Of the sites.
        together: Whether pairs may be measured at the same time: not if sites share a machine.
    """
    if not together:
        return [[(a, b)] for i, a in enumerate(ranks) for b in ranks[i + 1 :]]
    seats: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([_ordered(a, b) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _ordered(a: int, b: int) -> _Pair:
    return min(a, b), max(a, b)


def measure_pairs(board: Board, listener: socket.socket, roll: Roll, tell: Tell) -> None:
    """Measures this site's pairs when it is their turn, and posts what came of them.

    Args:
        board: Where the sites meet.
        listener: Of this site.
        roll: Who is there.
        tell: Hears which pair is measured.

    Raises:
        SilentError: Some sites did not come to the next round.
    """
    sites = {site.rank: site for site in roll.sites}
    together = len({site.machine for site in roll.sites}) == len(sites)
    course = rounds(roll.ranks, together=together)

    def tell_waiting(ranks: list[int]) -> None:
        if board.rank not in ranks:
            tell(f"waiting for {named(ranks)}")

    for number, pairs in enumerate(course):
        board.post(f"round-{number}/{board.rank}", "here")
        board.wait(f"round-{number}", roll.ranks, ROUND_S, tell_waiting)
        shown = ", ".join(f"{a} and {b}" for a, b in pairs)
        tell(f"measuring the link of sites {shown} ({number + 1} of {len(course)})")
        for pair in pairs:
            if board.rank in pair:
                other = sites[pair[1] if pair[0] == board.rank else pair[0]]
                found = _measure(listener, sites[board.rank], other, roll.token)
                board.post(_key(pair, board.rank), found)
    board.post(f"measured/{board.rank}", "done")
    board.wait("measured", roll.ranks, ROUND_S, tell_waiting)


def _key(pair: _Pair, rank: int) -> str:
    return f"pair/{pair[0]}-{pair[1]}/{rank}"


def _measure(listener: socket.socket, me: Site, other: Site, token: str) -> dict[str, Any]:
    """What this site can tell of a pair, as JSON can hold it."""
    connected = connect(listener, me, other, token)
    found: dict[str, Any] = {"outgoing": connected.outgoing, "incoming": connected.incoming}
    if connected.line is None:
        return found
    with connected.line as line:
        try:
            rtt_s, rates = measure(line, lower=me.rank < other.rank)
        except (OSError, ValueError) as error:
            return {**found, "stopped": str(error)}
    return {**found, "rtt_s": rtt_s, "rates": asdict(rates)}


def measured(board: Board, roll: Roll) -> list[Measured]:
    """What both sites of every pair have posted, put together."""
    pairs = [pair for pairs in rounds(roll.ranks, together=False) for pair in pairs]
    addresses = {site.rank: f"{site.address}:{site.port}" for site in roll.sites}
    return [
        combine(
            pair,
            {r: board.read(_key(pair, r)) for r in pair if board.has(_key(pair, r))},
            addresses,
        )
        for pair in pairs
    ]


def combine(
    pair: _Pair, told: Mapping[int, dict[str, Any]], addresses: Mapping[int, str]
) -> Measured:
    """One link as both of its sites tell of it.

    Args:
        pair: The two ranks.
        told: What those have posted that could.
        addresses: Where each site listens, as ``10.0.0.1:40123``.
    """
    lower, higher = pair
    failures = []
    for rank, other in (pair, pair[::-1]):
        if why := told.get(rank, {}).get("outgoing"):
            failures.append(
                f"site {rank} cannot connect to site {other} at {addresses[other]}: {why}"
            )
        if "stopped" in told.get(rank, {}):
            failures.append(f"site {other} stopped answering site {rank} while they measured")
    figures = next((t for t in told.values() if "rates" in t), None)
    if figures is None:
        return Measured(lower, higher, failures=tuple(failures))
    return Measured(lower, higher, figures["rtt_s"], Rates(**figures["rates"]), tuple(failures))
