"""The course of the checks between sites, as one site goes through it."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from outergrad.launch.errors import SiteError
from outergrad.tools.doctor.board import Board, LostError, SilentError
from outergrad.tools.doctor.clocks import Clock, Offset, check_clocks, measure_offset
from outergrad.tools.doctor.findings import Finding, Level, merged, named, ok, problem, worst
from outergrad.tools.doctor.group import LIMIT_S, check_group, exchange
from outergrad.tools.doctor.interface import check_addresses
from outergrad.tools.doctor.links import check_links
from outergrad.tools.doctor.pairs import ROUND_S, Measured, measure_pairs, measured
from outergrad.tools.doctor.roll import Roll, Tell, UnmetError, check_roll, meet
from outergrad.tools.doctor.sites import Site, check_sharing, check_sizes, check_versions

_VERDICT_S = 2 * ROUND_S + 3 * LIMIT_S
_GOODBYE_S = 5.0


@dataclass(frozen=True)
class Report:
    """What there is to be told to the user.

    Attributes:
        sections: Findings under their titles.
        sites: That came.
        offsets: Of their clocks from site 0's.
        links: Between them.
        missing: Ranks of sites that did not come.
    """

    sections: dict[str, list[Finding]]
    sites: list[Site] = field(default_factory=list)
    offsets: dict[int, Offset | None] = field(default_factory=dict)
    links: list[Measured] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """All of them, in order."""
        return [finding for findings in self.sections.values() for finding in findings]

    @property
    def exit_code(self) -> int:
        """1 where a problem keeps sites from training."""
        return int(worst(self.findings) == Level.PROBLEM)


def examine(
    board: Board,
    me: Site,
    listener: socket.socket,
    timeout_s: float,
    tell: Tell = lambda _: None,
    clock: Clock = time.time,
) -> Report:
    """Meets the other sites and checks what is between them. All sites must call it.

    Args:
        board: Where the sites meet.
        me: This site.
        listener: Where this site listens for the others.
        timeout_s: How long to wait for the others to come.
        tell: Hears what is being done.
        clock: Seconds since 1970.

    Returns:
        Everything at site 0; at the others only what their user must hear from them.
    """
    try:
        roll = meet(board, me, timeout_s, tell)
        silent = _measure(board, me, listener, roll, tell, clock)
        if board.rank == 0:
            return _report(board, roll, silent, timeout_s)
    except UnmetError as unmet:
        return Report({"Meeting": [unmet.finding]})
    except (LostError, TimeoutError) as lost:
        return Report({"Meeting": [_lost(str(lost))]})
    return Report({"Meeting": check_roll(roll.missing, timeout_s)} if roll.missing else {})


def _measure(
    board: Board, me: Site, listener: socket.socket, roll: Roll, tell: Tell, clock: Clock
) -> list[int]:
    """Measures clocks and links, and tries gloo; the ranks of sites that fell silent."""
    if check_sizes(roll.sites):
        return []
    tell("comparing the clocks")
    offset = measure_offset(board, roll.ranks, clock)
    board.post(f"offset/{board.rank}", vars(offset) if offset else None)
    try:
        measure_pairs(board, listener, roll, tell)
        if not roll.missing:
            tell("summing a number over all sites with gloo")
            board.post(f"gloo/{board.rank}", exchange(board))
            board.wait("gloo", roll.ranks, 3 * LIMIT_S)
    except SilentError as silent:
        return silent.ranks
    return []


def _report(board: Board, roll: Roll, silent: Sequence[int], timeout_s: float) -> Report:
    offsets = _offsets(board, roll)
    links = measured(board, roll)
    return Report(
        {
            "The machines": _machines(roll.sites),
            "Between the sites": [
                *_meeting(roll, silent, timeout_s),
                *check_versions(roll.sites),
                *check_clocks(offsets),
                *check_sharing(roll.sites),
                *_addresses(roll.sites),
                *_group(board, roll),
            ],
            "Links": check_links(links, len(roll.sites), rehearsal=_one_machine(roll.sites)),
        },
        roll.sites,
        offsets,
        links,
        roll.missing,
    )


def _offsets(board: Board, roll: Roll) -> dict[int, Offset | None]:
    ranks = [rank for rank in roll.ranks[1:] if board.has(f"offset/{rank}")]
    told = {rank: board.read(f"offset/{rank}") for rank in ranks}
    return {rank: Offset(**t) if (t := told.get(rank)) else None for rank in roll.ranks[1:]}


def _machines(sites: Sequence[Site]) -> list[Finding]:
    """What the sites found of their machines; what is well everywhere, in one line."""
    findings = merged([site.findings for site in sites], [site.rank for site in sites])
    bad = [finding for finding in findings if finding.level != Level.OK]
    well = sum(finding.level == Level.OK for site in sites for finding in site.findings)
    return [ok("machines", f"{well} checks at {named([s.rank for s in sites])} are well"), *bad]


def _one_machine(sites: Sequence[Site]) -> bool:
    return len({site.machine for site in sites}) == 1


def _addresses(sites: Sequence[Site]) -> list[Finding]:
    if _one_machine(sites):
        return []
    return check_addresses({site.rank: site.address for site in sites})


def _meeting(roll: Roll, silent: Sequence[int], timeout_s: float) -> list[Finding]:
    findings = [*check_roll(roll.missing, timeout_s), *check_sizes(roll.sites)]
    if silent:
        said = f"{named(silent)} stopped answering during the checks"
        remedy = "look at the terminal there: a stopped process, a lost network, or a late start"
        findings.append(problem("meeting", said, remedy))
    return findings or [ok("meeting", f"all {len(roll.sites)} sites came")]


def _group(board: Board, roll: Roll) -> list[Finding]:
    if roll.missing or not board.has("gloo/0"):
        return []
    told = {r: board.read(f"gloo/{r}") for r in roll.ranks if board.has(f"gloo/{r}")}
    return [check_group(told, roll.ranks)]


def _lost(why: str) -> Finding:
    said = f"site 0 has stopped answering ({why}): look at the terminal there"
    return problem("meeting", said, "start all sites again")


def agree_on_verdict(board: Board, report: Report) -> int:
    """The exit code of all sites, which is site 0's; site 0 waits for the others to hear it.

    Args:
        board: Where the sites meet.
        report: This site's own.

    Raises:
        SiteError: Site 0 does not tell.
    """
    try:
        if board.rank:
            return report.exit_code or _hear_verdict(board)
        board.post("verdict/0", report.exit_code)
        board.wait("bye", [site.rank for site in report.sites[1:]], _GOODBYE_S)
    except (LostError, SilentError, TimeoutError) as error:
        if board.rank:
            raise SiteError(f"site {board.rank}: {_lost(str(error)).said}") from error
    finally:
        with suppress(LostError):
            board.post(f"bye/{board.rank}", "bye")
    return report.exit_code


def _hear_verdict(board: Board) -> int:
    board.wait("verdict", [0], _VERDICT_S)
    return board.read("verdict/0")
