"""The checks, from the view of one site, and their report."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TextIO

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from outergrad._amounts import many, seconds, times
from outergrad._printable import printable
from outergrad.launch.errors import SiteError
from outergrad.launch.machine import versions
from outergrad.launch.processes import run_processes
from outergrad.launch.traffic import stay_on_loopback
from outergrad.tools.doctor.findings import Finding, Level, merged, named, ok, problem
from outergrad.tools.doctor.links import (
    ROUND_S,
    Measured,
    check_links,
    listen,
    measure_pairs,
    measured,
    rate,
)
from outergrad.tools.doctor.machine import check_addresses, look_at_machine, taken_here
from outergrad.tools.doctor.meeting import (
    Board,
    Clock,
    LostError,
    Meeting,
    Offset,
    Roll,
    Site,
    Tell,
    UnmetError,
    bounded,
    check_sizes,
    compare,
    measure_offset,
    meet,
    not_come,
    open_store,
)

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


_LINE = "\n"
_MARKS = {
    Level.OK: ("✓", "+", "green"),
    Level.NOTE: ("•", "-", "cyan"),
    Level.WARNING: ("!", "!", "yellow"),
    Level.PROBLEM: ("✗", "x", "bold red"),
}
"""Symbol, its ASCII substitute, and style of each level."""


def show(console: Console, report: Diagnosis, closing: str = "") -> None:
    """Prints a report: sections, tables, the verdict, and `closing` if there is no problem."""
    plain = not console.encoding.lower().startswith("utf")
    for title, findings in report.sections.items():
        console.print(Text(title, style="bold"))
        parts = [_lines(findings, plain)]
        if title == "Between the sites":
            parts.insert(0, _sites(report))
        if title == "Links" and any(link.rates for link in report.links):
            parts.insert(0, _links(report.links))
        for part in parts:
            console.print(Padding(part, (0, 0, 1, 2)))
    console.print(_verdict(report.findings))
    if closing and not report.exit_code:
        console.print(closing, highlight=False, markup=False)


def _lines(findings: Sequence[Finding], plain: bool) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column(no_wrap=True, min_width=12)
    grid.add_column()
    for finding in findings:
        symbol, ascii_symbol, style = _MARKS[finding.level]
        text = Text(printable(finding.said, keep=_LINE))
        if finding.remedy:
            urgent = finding.level >= Level.WARNING
            remedy = f"\n{'->' if plain else '→'} {printable(finding.remedy, keep=_LINE)}"
            text.append(remedy, style="bold" if urgent else "dim")
        mark = f"{ascii_symbol if plain else symbol} {finding.level.name.lower()}"
        grid.add_row(Text(mark, style=style), finding.what, text)
    return grid


def _sites(report: Diagnosis) -> Table:
    rows = {rank: (str(rank), "did not come", "", "") for rank in report.roll.missing}
    for site in report.roll.sites:
        clock = str(report.offsets.get(site.rank) or "not measured") if site.rank else "reference"
        listens = f"{site.address} ({site.interface})"
        rows[site.rank] = (str(site.rank), site.host, listens, clock)
    table = _table("site", "machine", "gloo listens at", "clock ahead by")
    for rank in sorted(rows):
        table.add_row(*rows[rank])
    return table


def _links(links: Sequence[Measured]) -> Table:
    table = _table("from", "to", "there and back", "one way at a time", "both ways at once")
    for column in table.columns[2:]:
        column.justify = "right"
    for link in links:
        pair, rates = (f"site {link.lower}", f"site {link.higher}"), link.rates
        if rates:
            table.add_row(*pair, seconds(link.rtt_s, times), rate(rates.alone), rate(rates.both))
            table.add_row(*pair[::-1], "", rate(rates.alone_back), rate(rates.both_back))
        else:
            table.add_row(*pair, "-", "not measured", "-")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _verdict(findings: Sequence[Finding]) -> Text:
    problems = [finding.what for finding in findings if finding.level == Level.PROBLEM]
    warnings = sum(finding.level == Level.WARNING for finding in findings)
    if problems:
        count = many(len(problems), "problem")
        count += f" and {many(warnings, 'warning')}" if warnings else ""
        names = ", ".join(dict.fromkeys(problems))
        said, style = f"{count}: mend {names} as said above, then look again.", "bold red"
    elif warnings:
        said = f"no problem, {many(warnings, 'warning')}: training will run; read the above."
        style = "bold yellow"
    else:
        said, style = "all is well.", "bold green"
    return Text(f"VERDICT: {said}", style=style)


_NEXT = """
Next, between two machines, with the address of the first one:
  on the first:   outergrad doctor --sites 2 --master ADDRESS --rank 0
  on the second:  outergrad doctor --sites 2 --master ADDRESS --rank 1
Or rehearse on this machine:  outergrad doctor --sites 2"""


def check_alone() -> int:
    """Checks this machine, and returns the exit code."""
    report = Diagnosis({"This machine": look_at_machine(os.environ)})
    show(Console(), report, _NEXT)
    return report.exit_code


def check_rehearsal(sites: int, timeout_s: float) -> int:
    """Checks this machine and local processes in the role of sites; returns the exit code."""
    limit = timedelta(seconds=timeout_s)
    store = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    meetings = [
        Meeting(rank=rank, sites=sites, host="127.0.0.1", port=store.port, hosted=True)
        for rank in range(sites)
    ]
    return max(run_processes([partial(_rehearse, m, timeout_s) for m in meetings]))


def _rehearse(meeting: Meeting, timeout_s: float) -> int:
    torch.set_num_threads(max(1, torch.get_num_threads() // meeting.sites))
    findings = look_at_machine(os.environ, sites_here=meeting.sites)
    stay_on_loopback()
    return _check_together(meeting, timeout_s, findings)


def check_at_site(meeting: Meeting, timeout_s: float) -> int:
    """Checks this machine and, together with other sites, the links; returns the exit code."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return _check_together(meeting, timeout_s, look_at_machine(os.environ, sites_here=here))


def _check_together(meeting: Meeting, timeout_s: float, findings: list[Finding]) -> int:
    with (
        quiet_libraries() as terminal,
        Console(file=terminal).status(f"site {meeting.rank} starts") as status,
    ):
        report, board = _examined(
            meeting, timeout_s, findings, lambda text: status.update(f"{text} (Ctrl-C ends)")
        )
    if meeting.rank == 0 or board is None:
        show(Console(), report)
    else:
        for finding in report.findings:
            said = f"outergrad: site {meeting.rank}: {finding.said}; {finding.remedy}"
            Console(stderr=True).print(said, highlight=False, markup=False)
    if board is None:
        return report.exit_code
    with quiet_libraries():
        return agree_on_verdict(board, report)


def _examined(
    meeting: Meeting, timeout_s: float, findings: list[Finding], tell: Tell
) -> tuple[Diagnosis, Board | None]:
    taken = taken_here(os.environ)
    address = taken.address or "127.0.0.1"
    try:
        listener = listen(address)
    except OSError as error:
        said = f"cannot listen at {taken.address}: {os.strerror(error.errno or 0)}"
        unheard = problem("interface", said, "choose another interface with GLOO_SOCKET_IFNAME")
        return Diagnosis({"This machine": [*findings, unheard]}), None
    with listener:
        try:
            store = open_store(meeting, timeout_s, tell)
        except UnmetError as unmet:
            return Diagnosis({"This machine": findings, "Meeting": [unmet.finding]}), None
        board = Board(store, meeting.rank, meeting.sites)
        me = Site(
            rank=meeting.rank,
            sites=meeting.sites,
            host=socket.gethostname(),
            interface=taken.interface or "?",
            address=address,
            port=listener.getsockname()[1],
            versions=versions(),
            findings=findings,
        )
        return examine(board, me, listener, timeout_s, tell), board


@contextmanager
def quiet_libraries() -> Iterator[TextIO]:
    """Context that yields the error stream, to which only this program can write meanwhile.

    If a connection fails, PyTorch's libraries print a long stack trace; the report has a sentence
    instead.
    """
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "w") as terminal, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield terminal
        finally:
            os.dup2(terminal.fileno(), 2)
