"""Sequence of the checks between sites, from the view of one site."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from outergrad.launch.errors import SiteError
from outergrad.tools.doctor.board import Board, LostError, Tell, bounded
from outergrad.tools.doctor.findings import Finding, Level, merged, named, ok, problem
from outergrad.tools.doctor.interface import check_addresses
from outergrad.tools.doctor.links import ROUND_S, Measured, check_links, measure_pairs, measured
from outergrad.tools.doctor.meeting import Roll, UnmetError, meet, not_come
from outergrad.tools.doctor.sites import Clock, Offset, Site, check_sizes, compare, measure_offset

_GLOO_S = 10.0
_SUMS = 5
_VERDICT_S = 2 * ROUND_S + 3 * _GLOO_S
_GOODBYE_S = 5.0

_STOPPED = "stopped answering during the checks"
_LOOK = "look at the terminal there: a stopped process, a lost network, or a late start"


@dataclass(frozen=True)
class Diagnosis:
    """Report for the user: findings by section title, and measurements."""

    sections: dict[str, list[Finding]]
    roll: Roll = field(default_factory=Roll)
    offsets: dict[int, Offset | None] = field(default_factory=dict)
    links: list[Measured] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """All findings, in order."""
        return [finding for findings in self.sections.values() for finding in findings]

    @property
    def exit_code(self) -> int:
        """1 if a problem keeps sites from training, else 0."""
        return int(any(finding.level == Level.PROBLEM for finding in self.findings))


def examine(
    board: Board,
    me: Site,
    listener: socket.socket,
    timeout_s: float,
    tell: Tell = lambda _: None,
    clock: Clock = time.time,
) -> Diagnosis:
    """Meets the other sites and runs all checks between them. All sites must call it.

    The timeout is for the others to come. Progress goes to `tell`.

    Returns:
        The whole report at site 0; at other sites only what their own user must see.
    """
    try:
        roll = meet(board, me, timeout_s, tell)
        unmet = [problem("meeting", *not_come(roll.missing, timeout_s))] if roll.missing else []
        silent = _measure(board, listener, roll, tell, clock)
        if board.rank == 0:
            unmet += check_sizes(roll.sites)
            if silent:
                unmet.append(problem("meeting", f"{named(silent)} {_STOPPED}", _LOOK))
            return _report(board, roll, unmet)
    except UnmetError as alone:
        return Diagnosis({"Meeting": [alone.finding]})
    except (LostError, TimeoutError) as lost:
        return Diagnosis({"Meeting": [problem("meeting", _lost(lost), "start all sites again")]})
    return Diagnosis({"Meeting": unmet})


def _measure(
    board: Board, listener: socket.socket, roll: Roll, tell: Tell, clock: Clock
) -> list[int]:
    """Measures clocks and links, and tries gloo; returns the ranks that stopped answering."""
    if check_sizes(roll.sites):
        return []
    tell("comparing the clocks")
    offset = measure_offset(board, roll.ranks, clock)
    board.post(f"offset/{board.rank}", vars(offset) if offset else None)
    if silent := measure_pairs(board, listener, roll, tell):
        return silent
    if roll.missing:
        return []
    tell("summing a number over all sites with gloo")
    board.post(f"gloo/{board.rank}", _try_gloo(board))
    return board.wait("gloo", roll.ranks, 3 * _GLOO_S)


def _report(board: Board, roll: Roll, unmet: Sequence[Finding]) -> Diagnosis:
    told = board.read_all("offset", roll.ranks)
    offsets = {r: Offset(**o) if (o := told.get(r)) else None for r in roll.ranks[1:]}
    links, alone = measured(board, roll), len(roll.machines) == 1
    gloo = board.read_all("gloo", roll.ranks)
    between = [
        *(unmet or [ok("meeting", f"all {len(roll.sites)} sites came")]),
        *compare(roll.sites, offsets),
        *([] if alone else check_addresses({site.rank: site.address for site in roll.sites})),
        *([check_group(gloo, roll.ranks)] if 0 in gloo else []),
    ]
    judged = [*check_links(links, len(roll.sites), rehearsal=alone)]
    sections = {"The machines": _machines(roll), "Between the sites": between, "Links": judged}
    return Diagnosis(sections, roll, offsets, links)


def _machines(roll: Roll) -> list[Finding]:
    """Findings about single machines; those without a problem are merged into one line."""
    findings_S = [site.findings for site in roll.sites]
    well = sum(finding.level == Level.OK for findings in findings_S for finding in findings)
    summary = ok("machines", f"{well} checks at {named(roll.ranks)} are well")
    return [summary, *(f for f in merged(findings_S, roll.ranks) if f.level != Level.OK)]


def _lost(why: Exception) -> str:
    return f"site 0 has stopped answering ({why}): look at the terminal there"


def _try_gloo(board: Board) -> tuple[float | None, str | None]:
    """Seconds of the fastest all-reduce of a number over all sites, or the error."""
    try:
        return bounded(lambda: _quickest_sum_s(board), 2 * _GLOO_S), None
    except (RuntimeError, TimeoutError) as error:
        return None, str(error).splitlines()[0]


def _quickest_sum_s(board: Board) -> float:
    store, limit = PrefixStore("gloo", board.store), timedelta(seconds=_GLOO_S)
    group = dist.ProcessGroupGloo(store, board.rank, board.sites, limit)
    took_s = []
    for _ in range(_SUMS):
        began_s = time.perf_counter()
        group.allreduce([torch.ones(1)]).wait()  # pyright: ignore[reportAttributeAccessIssue]
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def check_group(told: Mapping[int, Sequence[float | str | None]], ranks: Sequence[int]) -> Finding:
    """Checks that gloo connects all sites, from each site's result by rank."""
    failed = [rank for rank in ranks if rank not in told or told[rank][1]]
    if not failed:
        slowest_s = max(float(told[rank][0] or 0.0) for rank in ranks)
        return ok("gloo", f"joins all sites; a sum over them takes {1e3 * slowest_s:.1f} ms")
    why = next((told[rank][1] for rank in failed if rank in told), "no answer")
    remedy = "name the interface that leads to the other sites in GLOO_SOCKET_IFNAME, at every site"
    return problem("gloo", f"does not join {named(failed)} with the others: {why}", remedy)


def agree_on_verdict(board: Board, report: Diagnosis) -> int:
    """Returns site 0's exit code, or this site's own if that is not 0.

    Site 0 waits a while for the others to read it.

    Raises:
        SiteError: Site 0 does not answer.
    """
    try:
        if board.rank:
            if not report.exit_code and board.wait("verdict", [0], _VERDICT_S):
                raise TimeoutError("no word of [0]")
            return report.exit_code or board.read("verdict/0")
        board.post("verdict/0", report.exit_code)
        board.wait("bye", report.roll.ranks[1:], _GOODBYE_S)
    except (LostError, TimeoutError) as error:
        if board.rank:
            raise SiteError(f"site {board.rank}: {_lost(error)}") from error
    finally:
        with suppress(LostError):
            board.post(f"bye/{board.rank}", "bye")
    return report.exit_code
