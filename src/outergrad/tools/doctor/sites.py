"""Descriptions that sites exchange, and checks of the differences between sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outergrad.tools.doctor.board import Board
from outergrad.tools.doctor.findings import Finding, heard, named, note, ok, problem, warning

SAME_NUMBER = "start all sites with the same number of sites"

_SAME_MATTERS = ("outergrad", "torch")
_QUESTIONS = 6
_APART_S = 2.0
_CLOSE_S = 0.1

Clock = Callable[[], float]
"""Function that returns the seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Description of a site by itself."""

    rank: int
    sites: int  # number of sites that it expects
    host: str  # name of its machine
    interface: str  # interface that gloo uses
    address: str  # address of the interface, where the site listens for the others
    port: int
    versions: dict[str, str]
    findings: list[Finding]  # about its machine

    @property
    def machine(self) -> str:
        """Identifier of its machine; host names alone may coincide."""
        return f"{self.host} {self.address}"

    def told(self) -> dict[str, Any]:
        """Returns the description in JSON types."""
        return {**vars(self), "findings": [finding.told() for finding in self.findings]}


def site_heard(told: dict[str, Any]) -> Site:
    """Returns a site from the form of `Site.told`."""
    return Site(**{**told, "findings": [heard(finding) for finding in told["findings"]]})


def compare(sites: Sequence[Site], offsets: Mapping[int, Offset | None]) -> list[Finding]:
    """Checks that versions and clocks agree, and whether sites share a machine."""
    return [*check_versions(sites), *check_clocks(offsets), *check_sharing(sites)]


def check_versions(sites: Sequence[Site]) -> list[Finding]:
    """Checks that all sites have the same versions; names those that differ from most."""
    same, findings = [], []
    for name, version in sites[0].versions.items():
        having: dict[str, list[int]] = {}
        for site in sites:
            having.setdefault(site.versions.get(name, "none"), []).append(site.rank)
        if len(having) == 1:
            same.append(f"{name} {version}")
        else:
            findings.append(_differing(name, having))
    if same:
        findings.insert(0, ok("versions", f"the same at all sites: {', '.join(same)}"))
    return findings


def _differing(name: str, having: Mapping[str, Sequence[int]]) -> Finding:
    told = {
        version: f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'} {version}"
        for version, ranks in having.items()
    }
    usual = told.pop(max(having, key=lambda version: len(having[version])))
    said = f"{'; '.join(told.values())} where {usual}"
    if name in _SAME_MATTERS:
        return problem(name, said, f"install the same version of {name} everywhere")
    return note(name, said, f"training works, but the same {name} everywhere is safer")


def check_sizes(sites: Sequence[Site]) -> list[Finding]:
    """Checks that all sites expect the same number of sites."""
    beside = f"site {sites[0].rank} {sites[0].sites}"
    return [
        problem("meeting", f"site {s.rank} expects {s.sites} sites, {beside}", SAME_NUMBER)
        for s in sites
        if s.sites != sites[0].sites
    ]


def check_sharing(sites: Sequence[Site]) -> list[Finding]:
    """Reports sites that share a machine."""
    machines = Counter(site.machine for site in sites)
    if len(machines) == 1:
        said = f"all sites are on one machine, {sites[0].host}: a rehearsal"
        return [note("machines", said)]
    shared = ", ".join(f"{n} sites on {machine}" for machine, n in machines.items() if n > 1)
    if not shared:
        return []
    remedy = "one site per machine exchanges least: use its GPUs within the site"
    return [warning("machines", f"{shared}: they share its link to the others", remedy)]


@dataclass(frozen=True)
class Offset:
    """Lead of a site's clock over site 0's."""

    seconds: float  # estimate; negative if the clock is behind
    uncertain_s: float  # largest error of the estimate

    def __str__(self) -> str:
        if abs(self.seconds) >= _APART_S:
            return f"{self.seconds:+,.1f} s ± {self.uncertain_s:.1f} s"
        return f"{1e3 * self.seconds:+.1f} ms ± {1e3 * self.uncertain_s:.1f} ms"


def measure_offset(board: Board, ranks: Sequence[int], clock: Clock) -> Offset | None:
    """Measures the clock against site 0's; site 0 answers all sites in turn.

    The answer is given at an unknown time between question and receipt. The fastest of several
    exchanges counts, and half its duration is the uncertainty. None at site 0, or without an
    answer.
    """
    if board.rank == 0:
        for rank in ranks[1:]:
            _answer(board, rank, clock)
        return None
    with suppress(TimeoutError, RuntimeError):
        if not board.wait("clock", [board.rank], 15.0 * len(ranks)):
            offsets = [_ask(board, turn, clock) for turn in range(_QUESTIONS)]
            return min(offsets, key=lambda offset: offset.uncertain_s)
    return None


def _answer(board: Board, rank: int, clock: Clock) -> None:
    board.post(f"clock/{rank}", "ask")
    for turn in range(_QUESTIONS):
        try:
            board.await_note(f"question/{rank}/{turn}")
        except TimeoutError:
            return
        board.post(f"answer/{rank}/{turn}", clock())


def _ask(board: Board, turn: int, clock: Clock) -> Offset:
    asked_s = clock()
    board.post(f"question/{board.rank}/{turn}", "what time is it?")
    board.await_note(f"answer/{board.rank}/{turn}")
    heard_s = clock()
    answer_s = board.read(f"answer/{board.rank}/{turn}")
    return Offset((asked_s + heard_s) / 2 - answer_s, (heard_s - asked_s) / 2)


def check_clocks(offsets: Mapping[int, Offset | None]) -> list[Finding]:
    """Checks each site's clock against site 0's; offsets are by rank."""
    if findings := [finding for rank, o in offsets.items() if (finding := _check_clock(rank, o))]:
        return findings
    within_s = max((abs(o.seconds) + o.uncertain_s for o in offsets.values() if o), default=0.0)
    return [ok("clocks", f"all within {1e3 * within_s:.1f} ms of site 0's")]


def _check_clock(rank: int, offset: Offset | None) -> Finding | None:
    if offset is None:
        return note("clocks", f"site {rank}'s was not measured: it did not answer in time")
    apart_s = abs(offset.seconds)
    side = "ahead of" if offset.seconds > 0 else "behind"
    said = f"site {rank} is {apart_s:,.1f} s {side} site 0"
    if apart_s - offset.uncertain_s > _APART_S:
        said += ": training does not mind, but logs cannot be compared and certificates may be "
        said += "refused"
        remedy = "set the clock by the network, as with `timedatectl set-ntp true`"
        return warning("clocks", said, remedy)
    if apart_s - offset.uncertain_s > _CLOSE_S:
        return note("clocks", f"{said}: seen in logs alone")
    return None
