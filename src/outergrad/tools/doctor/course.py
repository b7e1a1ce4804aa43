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
from typing import Any, TextIO

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch._C._distributed_c10d import PrefixStore, TCPStore

from outergrad._amounts import many, seconds, times
from outergrad._printable import printable
from outergrad.comm.board import bounded
from outergrad.core.addresses import loopback
from outergrad.core.errors import BoardGoneError
from outergrad.launch.console import say
from outergrad.launch.errors import SiteError
from outergrad.launch.machine import versions
from outergrad.launch.processes import run_processes
from outergrad.launch.traffic import stay_on_loopback
from outergrad.tools.doctor.findings import Finding, Level, merged, named, ok, problem
from outergrad.tools.doctor.links import (
    Measured,
    check_links,
    listen,
    measure_pairs,
    measured,
    rate,
)
from outergrad.tools.doctor.machine import (
    check_addresses,
    check_kinds,
    look_at_machine,
    taken_here,
)
from outergrad.tools.doctor.meeting import (
    Board,
    Clock,
    Meeting,
    Offset,
    Roll,
    Site,
    UnmetError,
    check_clocks,
    check_sharing,
    check_sizes,
    check_versions,
    measure_offset,
    meet,
    not_come,
    open_store,
)

_GLOO_S = 10.0
_SUMS = 5
_VERDICT_S = 90.0  # site 0 may wait for others in two rounds, and for gloo
_GOODBYE_S = 5.0
_LOOK = "look at the terminal there: a stopped process, a lost network, or a late start"
_STOPPED = "site 0 has stopped answering ({}): look at the terminal there"


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
    board: Board, me: Site, listener: socket.socket, timeout_s: float, clock: Clock = time.time
) -> Diagnosis:
    """Meets the other sites and runs all checks between them; all sites must call it.

    The timeout is for the others to come. The report is whole at site 0; at other sites it has only
    what their own user must see.
    """
    try:
        roll = meet(board, me, timeout_s)
        unmet = [problem("meeting", *not_come(roll.missing, timeout_s))] if roll.missing else []
        odd = [*check_sizes(roll.sites)]
        silent = [] if odd else _measure(board, listener, roll, clock)
        if board.rank == 0:
            unmet += odd
            if silent:
                said = f"{named(silent)} stopped answering during the checks"
                unmet.append(problem("meeting", said, _LOOK))
            return _report(board, roll, unmet)
    except UnmetError as alone:
        unmet = [alone.finding]
    except BoardGoneError as lost:
        unmet = [problem("meeting", _STOPPED.format(lost), "start all sites again")]
    return Diagnosis({"Meeting": unmet})


def _measure(board: Board, listener: socket.socket, roll: Roll, clock: Clock) -> list[int]:
    """Measures clocks and links, and tries gloo; returns the ranks that stopped answering."""
    board.tell("comparing the clocks")
    if offset := measure_offset(board, roll.ranks, clock):
        board.post(f"offset/{board.rank}", vars(offset))
    if silent := measure_pairs(board, listener, roll):
        return silent
    if roll.missing:
        return []
    board.tell("summing a number over all sites with gloo")
    try:
        took_s, why = bounded(lambda: _quickest_sum_s(board), 2 * _GLOO_S), None
    except (RuntimeError, TimeoutError) as error:
        took_s, why = None, str(error).splitlines()[0]
    board.post(f"gloo/{board.rank}", [took_s, why])
    return board.wait("gloo", roll.ranks, 3 * _GLOO_S)


def _quickest_sum_s(board: Board) -> float:
    store, limit = PrefixStore("gloo", board.store), timedelta(seconds=_GLOO_S)
    group = dist.ProcessGroupGloo(store, board.rank, board.sites, limit)
    took_s = []
    for _ in range(_SUMS):
        began_s = time.perf_counter()
        group.allreduce([torch.ones(1)]).wait()  # pyright: ignore[reportAttributeAccessIssue]
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def check_group(told: Mapping[int, Sequence[Any]], ranks: Sequence[int]) -> Iterator[Finding]:
    """Checks that gloo connects all sites, from each site's seconds and error by rank."""
    failed = [rank for rank in ranks if rank not in told or told[rank][1]]
    if not failed:
        slowest_s = max(told[rank][0] for rank in ranks)
        yield ok("gloo", f"joins all sites; a sum over them takes {1e3 * slowest_s:.1f} ms")
        return
    why = next((told[rank][1] for rank in failed if rank in told), "no answer")
    remedy = "name the interface that leads to the other sites in GLOO_SOCKET_IFNAME, at every site"
    yield problem("gloo", f"does not join {named(failed)} with the others: {why}", remedy)


def _report(board: Board, roll: Roll, unmet: Sequence[Finding]) -> Diagnosis:
    told = board.read_all("offset", roll.ranks)
    offsets = {r: Offset(**told[r]) if r in told else None for r in roll.ranks[1:]}
    gloo = board.read_all("gloo", roll.ranks)
    links, rehearsal = measured(board, roll), len(roll.machines) == 1
    addresses = {site.rank: site.address for site in roll.sites}
    of_machines = merged([site.findings for site in roll.sites], roll.ranks)
    well = sum(finding.level == Level.OK for site in roll.sites for finding in site.findings)
    sections = {
        "The machines": [
            ok("machines", f"{well} checks at {named(roll.ranks)} are well"),
            *(finding for finding in of_machines if finding.level != Level.OK),
        ],
        "Between the sites": [
            *(unmet or [ok("meeting", f"all {len(roll.sites)} sites came")]),
            *check_versions(roll.sites),
            *check_clocks(offsets),
            *check_sharing(roll.sites),
            *(() if rehearsal else check_kinds(addresses)),
            *(() if rehearsal else check_addresses(addresses)),
            *(check_group(gloo, roll.ranks) if 0 in gloo else ()),
        ],
        "Links": [*check_links(links, len(roll.sites), rehearsal=rehearsal)],
    }
    return Diagnosis(sections, roll, offsets, links)


def agree_on_verdict(board: Board, report: Diagnosis) -> tuple[int, Text]:
    """Returns site 0's exit code and verdict, or this site's own if its code is not 0."""
    code, verdict = report.exit_code, _verdict(report.findings)
    try:
        if board.rank == 0:
            board.post("judged/0", _judged(report.findings))  # before what the others wait for
            board.post("verdict/0", code)
            board.wait("bye", report.roll.ranks[1:], _GOODBYE_S)
        elif not code:
            if board.wait("verdict", [0], _VERDICT_S):
                raise BoardGoneError("no word of [0]")
            code = board.read("verdict/0")
            verdict = _verdict_of_all(board.read("judged/0")) or verdict
    except BoardGoneError as error:
        if board.rank:
            raise SiteError(f"site {board.rank}: {_STOPPED.format(error)}") from error
    with suppress(BoardGoneError):
        board.post(f"bye/{board.rank}", "bye")
    return code, verdict


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
    _show_sections(console, report)
    console.print(_verdict(report.findings))
    if closing and not report.exit_code:
        console.print(closing, highlight=False, markup=False)


def _show_sections(console: Console, report: Diagnosis) -> None:
    plain = not console.encoding.lower().startswith("utf")
    tables = {"Between the sites": _sites(report), "Links": _links(report.links)}
    for title, findings in report.sections.items():
        if not findings and not tables.get(title):
            continue
        console.print(Text(title, style="bold"))
        for table in (tables.get(title), _lines(findings, plain)):
            if table:
                console.print(Padding(table, (0, 0, 1, 2)))


def _lines(findings: Sequence[Finding], plain: bool) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column(no_wrap=True, min_width=12)
    grid.add_column()
    for finding in findings:
        symbol, ascii_symbol, style = _MARKS[finding.level]
        text = Text(printable(finding.said, keep=_LINE))
        if finding.remedy:
            remedy = f"\n{'->' if plain else '→'} {printable(finding.remedy, keep=_LINE)}"
            text.append(remedy, style="bold" if finding.level >= Level.WARNING else "dim")
        mark = f"{ascii_symbol if plain else symbol} {finding.level.name.lower()}"
        grid.add_row(Text(mark, style=style), finding.what, text)
    return grid


def _sites(report: Diagnosis) -> Table:
    rows: dict[int, tuple[str, str, str]] = {}
    for rank in report.roll.missing:
        rows[rank] = ("did not come", "", "")
    for site in report.roll.sites:
        clock = str(report.offsets.get(site.rank) or "not measured") if site.rank else "reference"
        rows[site.rank] = (site.host, f"{site.address} ({site.interface})", clock)
    table = _table("site", "machine", "gloo listens at", "clock ahead by")
    for rank in sorted(rows):
        table.add_row(str(rank), *rows[rank])
    return table


def _links(links: Sequence[Measured]) -> Table | None:
    if not any(link.rtt_s for link in links):
        return None
    table = _table("from", "to", "there and back", "one way at a time", "both ways at once")
    for column in table.columns[2:]:
        column.justify = "right"
    for link in links:
        pair = (f"site {link.lower}", f"site {link.higher}")
        if link.rtt_s:
            rtt = seconds(link.rtt_s, times)
            table.add_row(*pair, rtt, rate(link.alone), rate(link.both))
            table.add_row(*pair[::-1], "", rate(link.alone_back), rate(link.both_back))
        else:
            table.add_row(*pair, "-", "not measured", "-")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _verdict(findings: Sequence[Finding]) -> Text:
    said, remedy, style = _judged(findings)
    return Text(f"VERDICT: {said}{remedy}.", style=style)


def _verdict_of_all(judged: Sequence[str] | None) -> Text | None:
    """Returns the verdict of site 0 for another site; None if site 0 is of an older version."""
    if judged is None:
        return None
    said, _, style = judged
    return Text(f"VERDICT of all sites: {said}; site 0 shows the whole report.", style=style)


def _judged(findings: Sequence[Finding]) -> tuple[str, str, str]:
    problems = [finding.what for finding in findings if finding.level == Level.PROBLEM]
    warnings = sum(finding.level == Level.WARNING for finding in findings)
    warned = many(warnings, "warning")
    if problems:
        count = many(len(problems), "problem") + (f" and {warned}" if warnings else "")
        names = ", ".join(dict.fromkeys(problems))
        return count, f": mend {names} as said above, then look again", "bold red"
    if warnings:
        return f"no problem, {warned}: training will run", "; read the above", "bold yellow"
    return "all is well", "", "bold green"


_NEXT = """
Next, between two machines, with the address of the first one:
  on the first:   outergrad doctor --sites 2 --master ADDRESS --rank 0
  on the second:  outergrad doctor --sites 2 --master ADDRESS --rank 1
Or rehearse on this machine:  outergrad doctor --sites 2"""


def check_alone() -> int:
    """Checks this machine, and returns the exit code."""
    report = Diagnosis({"This machine": look_at_machine()})
    show(Console(), report, _NEXT)
    return report.exit_code


def check_rehearsal(sites: int, timeout_s: float) -> int:
    """Checks this machine and local processes in the role of sites; returns the exit code."""
    limit = timedelta(seconds=timeout_s)
    here = loopback()
    store = TCPStore(here, 0, None, True, limit, wait_for_workers=False)
    meetings = [
        Meeting(rank=rank, sites=sites, host=here, port=store.port, hosted=True)
        for rank in range(sites)
    ]
    checks = [partial(check_at_site, m, timeout_s, rehearses=True) for m in meetings]
    return max(run_processes(checks))


def check_at_site(meeting: Meeting, timeout_s: float, *, rehearses: bool = False) -> int:
    """Checks this machine and, together with other sites, the links; returns the exit code."""
    if rehearses:
        torch.set_num_threads(max(1, torch.get_num_threads() // meeting.sites))
        findings = look_at_machine(sites_here=meeting.sites)
        stay_on_loopback()
    else:
        findings = look_at_machine(sites_here=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    taken = taken_here()
    address = taken.address or loopback()  # without one, the findings say so
    rank, sites, board = meeting.rank, meeting.sites, None
    with (
        quiet_libraries() as terminal,
        Console(file=terminal).status(f"site {rank} starts") as status,
    ):

        def tell(text: str) -> None:
            status.update(f"{text} (Ctrl-C ends)")

        try:
            with listen(address) as listener:
                board = Board(open_store(meeting, timeout_s, tell), rank, sites, tell)
                me = Site(
                    rank=rank,
                    sites=sites,
                    host=socket.gethostname(),
                    interface=taken.interface or "?",
                    address=address,
                    port=listener.getsockname()[1],
                    versions=versions(),
                    findings=findings,
                )
                report = examine(board, me, listener, timeout_s)
        except UnmetError as unmet:
            report = Diagnosis({"This machine": findings, "Meeting": [unmet.finding]})
    if board is None or rank == 0:
        show(Console(), report)
    elif meeting.by_hand:
        _show_sections(Console(), Diagnosis({"This machine": findings, **report.sections}))
    else:
        for finding in report.findings:
            say(f"site {rank}: {finding.said}; {finding.remedy}", below_a_bar=False)
    if board is None:
        return report.exit_code
    with quiet_libraries():
        code, verdict = agree_on_verdict(board, report)
    if rank and meeting.by_hand:
        Console().print(verdict)
    return code


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
