"""Starts the checks: of this machine alone, of local processes, or of sites that meet."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

import torch
from rich.console import Console
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from outergrad.launch.processes import run_processes
from outergrad.launch.start import stay_on_loopback
from outergrad.tools.doctor.board import Board
from outergrad.tools.doctor.connect import listen
from outergrad.tools.doctor.course import Report, agree_on_verdict, examine
from outergrad.tools.doctor.findings import Finding, problem
from outergrad.tools.doctor.machine import describe, look_at_machine, taken_here
from outergrad.tools.doctor.quiet import quiet_libraries
from outergrad.tools.doctor.rendezvous import Meeting, UnreachableError, open_store
from outergrad.tools.doctor.show import show

_NEXT = """
Next, between two machines, with the address of the first one:
  on the first:   outergrad doctor --sites 2 --master ADDRESS --rank 0
  on the second:  outergrad doctor --sites 2 --master ADDRESS --rank 1
Or rehearse on this machine:  outergrad doctor --sites 2"""


def check_alone() -> int:
    """Checks this machine, and returns the exit code."""
    report = Report({"This machine": look_at_machine(os.environ)})
    show(Console(), report, _NEXT)
    return report.exit_code


def check_rehearsal(sites: int, timeout_s: float) -> int:
    """Checks this machine and local processes that stand for sites."""
    store = TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False
    )
    meetings = [
        Meeting(rank=rank, sites=sites, host="127.0.0.1", port=store.port, hosted=True)
        for rank in range(sites)
    ]
    return max(run_processes([partial(_rehearse, m, timeout_s) for m in meetings]))


def _rehearse(meeting: Meeting, timeout_s: float) -> int:
    torch.set_num_threads(max(1, torch.get_num_threads() // meeting.sites))
    findings = look_at_machine(os.environ, sites_here=meeting.sites)
    stay_on_loopback()
    return check_together(meeting, timeout_s, findings)


def check_at_site(meeting: Meeting, timeout_s: float, environment: Mapping[str, str]) -> int:
    """Checks this machine, and with the other sites what is between them."""
    here = int(environment.get("LOCAL_WORLD_SIZE", 1))
    findings = look_at_machine(environment, sites_here=here)
    return check_together(meeting, timeout_s, findings)


def check_together(meeting: Meeting, timeout_s: float, findings: list[Finding]) -> int:
    """Goes through the checks as one of several sites, and returns the exit code.

    Args:
        meeting: Where.
        timeout_s: How long to wait for the others.
        findings: Of this machine.
    """
    with (
        quiet_libraries() as terminal,
        Console(file=terminal).status(f"site {meeting.rank} starts") as status,
    ):
        report, board = _examined(meeting, timeout_s, findings, _telling(status.update))
    if board is None:
        show(Console(), report)
        return report.exit_code
    if meeting.rank == 0:
        show(Console(), report)
    elif report.findings:
        _tell_apart(meeting, report)
    with quiet_libraries():
        return agree_on_verdict(board, report)


def _telling(update: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: update(f"{text} (Ctrl-C ends)")


def _examined(
    meeting: Meeting, timeout_s: float, findings: list[Finding], tell: Callable[[str], None]
) -> tuple[Report, Board | None]:
    taken = taken_here(os.environ)
    try:
        listener = listen(taken.address or "127.0.0.1")
    except OSError as error:
        said = f"cannot listen at {taken.address}: {error.strerror}"
        unheard = problem("interface", said, "choose another interface with GLOO_SOCKET_IFNAME")
        return Report({"This machine": [*findings, unheard]}), None
    with listener:
        try:
            store = open_store(meeting, timeout_s, tell)
        except UnreachableError as error:
            return Report({"This machine": findings, "Meeting": [error.finding]}), None
        board = Board(store, meeting.rank, meeting.sites)
        me = describe(meeting, taken, listener.getsockname()[1], findings)
        return examine(board, me, listener, timeout_s, tell), board


def _tell_apart(meeting: Meeting, report: Report) -> None:
    """Says at another site what its user must hear there."""
    console = Console(stderr=True)
    for finding in report.findings:
        console.print(
            f"outergrad: site {meeting.rank}: {finding.said}; {finding.remedy}",
            highlight=False,
            markup=False,
        )
