"""Who has come: every site says so, site 0 calls the roll."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outergrad.tools.doctor.board import Board, SilentError
from outergrad.tools.doctor.findings import Finding, named, problem
from outergrad.tools.doctor.sites import Site, site_heard

Tell = Callable[[str], None]

GRACE_S = 5.0
"""That a site waits longer for site 0's word than site 0 waits for the others."""


class UnmetError(RuntimeError):
    """This site has not met the others; the finding says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.said)
        self.finding = finding


@dataclass(frozen=True)
class Roll:
    """The sites that came.

    Attributes:
        sites: In order of their ranks.
        missing: Ranks of those that did not come.
        token: By which they know each other's connections.
    """

    sites: list[Site]
    missing: list[int]
    token: str

    @property
    def ranks(self) -> list[int]:
        """Of those who came."""
        return [site.rank for site in self.sites]


def meet(board: Board, me: Site, timeout_s: float, tell: Tell) -> Roll:
    """Tells the others of this site, and hears who has come.

    Args:
        board: Where the sites meet.
        me: This site.
        timeout_s: How long to wait for the others.
        tell: Hears whom this site waits for.

    Raises:
        UnmetError: Site 0 did not come, or does not know this site.
    """
    if board.count(f"came/{board.rank}") > 1:
        raise UnmetError(_twice(board, me))
    board.post(f"site/{board.rank}", me.told())
    if board.rank == 0:
        _call(board, timeout_s, tell)
    else:
        _hear(board, me, timeout_s, tell)
    told = board.read("roll/0")
    sites = [site_heard(board.read(f"site/{rank}")) for rank in told["present"]]
    return Roll(sites, told["missing"], told["token"])


def _call(board: Board, timeout_s: float, tell: Tell) -> None:
    everyone, missing = range(board.sites), []
    try:
        board.wait("site", everyone, timeout_s, lambda ranks: tell(_waiting(ranks)))
    except SilentError as silent:
        missing = silent.ranks
    present = [rank for rank in everyone if rank not in missing]
    roll = {"present": present, "missing": missing, "token": secrets.token_hex(8)}
    board.post("roll/0", roll)


def _hear(board: Board, me: Site, timeout_s: float, tell: Tell) -> None:
    try:
        board.wait("site", [0], timeout_s, lambda ranks: tell(_waiting(ranks)))
    except SilentError:
        here = [rank for rank in range(board.sites) if board.has(f"site/{rank}")]
        absent = [rank for rank in range(board.sites) if rank not in here]
        raise UnmetError(check_roll(absent, timeout_s)[0]) from None
    expected = board.read("site/0")["sites"]
    if expected != me.sites:
        raise UnmetError(_other_number(me, expected))
    try:
        board.wait("roll", [0], timeout_s + GRACE_S, lambda _: tell("waiting for the other sites"))
    except SilentError:
        raise UnmetError(_silent_host()) from None
    if me.rank not in board.read("roll/0")["present"]:
        raise UnmetError(_late(me))


def _waiting(ranks: Sequence[int]) -> str:
    return f"waiting for {named(ranks)}"


def check_roll(missing: Sequence[int], timeout_s: float) -> list[Finding]:
    """Who has not come."""
    if not missing:
        return []
    return [
        problem(
            "meeting",
            f"{named(missing)} did not come within {timeout_s:.0f} s",
            "start it there, or wait longer with --timeout; if it is running, see what it says",
        )
    ]


def _twice(board: Board, me: Site) -> Finding:
    first = board.read(f"site/{me.rank}")["host"]
    return problem(
        "meeting",
        f"two processes say that they are site {me.rank}: one on {first}, one on {me.host}",
        "give every site a number of its own (--rank, or --node-rank of torchrun)",
    )


def _other_number(me: Site, expected: int) -> Finding:
    return problem(
        "meeting",
        f"site {me.rank} expects {me.sites} sites, site 0 expects {expected}",
        "start all sites with the same number of sites",
    )


def _silent_host() -> Finding:
    said = "site 0 came, but has stopped answering"
    return problem("meeting", said, "look at site 0's terminal, and start all sites again")


def _late(me: Site) -> Finding:
    said = f"site {me.rank} came after site 0 had stopped waiting"
    return problem("meeting", said, "start all sites again, or wait longer with --timeout")
