"""Start of the checks: of this machine alone, of local processes, or of sites that meet."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TextIO

import torch
from rich.console import Console
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from outergrad.launch.loopback import stay_on_loopback
from outergrad.launch.machine import versions
from outergrad.launch.processes import run_processes
from outergrad.tools.doctor.board import Board, Tell
from outergrad.tools.doctor.course import Diagnosis, agree_on_verdict, examine
from outergrad.tools.doctor.findings import Finding, problem
from outergrad.tools.doctor.interface import taken_here
from outergrad.tools.doctor.line import listen
from outergrad.tools.doctor.machine import look_at_machine
from outergrad.tools.doctor.meeting import Meeting, UnmetError, open_store
from outergrad.tools.doctor.show import show
from outergrad.tools.doctor.sites import Site

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
