"""Meeting of the sites: notes in a common store, attendance, and how the sites differ."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from outergrad.comm.board import StoreBoard, bounded
from outergrad.core.addresses import Address, loopback, read_address
from outergrad.launch.errors import RecipeError
from outergrad.launch.start import master_host
from outergrad.tools.doctor.findings import Finding, Level, named, note, ok, problem, warning

T = TypeVar("T")
Tell = Callable[[str], None]  # called with what a site does or waits for
Clock = Callable[[], float]  # returns the seconds since 1970

PORT = 29500  # PyTorch's default

_ANSWER_S = 10.0  # longest time for the store to answer
_STORE_S = 5.0
_RETRY_S = 0.3
_GRACE_S = 5.0  # how much longer a site waits for site 0 than site 0 for the others

_QUESTIONS = 6
_APART_S = 2.0
_CLOSE_S = 0.1

_SAME_MATTERS = ("outergrad", "torch")
_SAME_NUMBER = "start all sites with the same number of sites"


class UnmetError(RuntimeError):
    """This site has not met the others; the finding says why."""

    def __init__(self, said: str, remedy: str, what: str = "meeting") -> None:
        super().__init__(said)
        self.finding = problem(what, said, remedy)


class Board:
    """A site's access to the notes, whose values are of JSON's types. Every wait has a limit.

    The note of site 2 is called ``name/2``. A note is written once, and stays.
    """

    def __init__(self, store: Store, rank: int, sites: int, tell: Tell = lambda _: None) -> None:
        self.store, self.rank, self.sites, self.tell = store, rank, sites, tell
        self._slots = StoreBoard(store, _ANSWER_S)

    def post(self, key: str, value: Any) -> Any:
        """Writes a note; returns what it says, which is another value if it was written before."""
        return json.loads(self._slots.first(key, json.dumps(value)))

    def read(self, key: str) -> Any:
        """Returns a note; None if there is none."""
        return json.loads(self._slots.slot(key) or "null")

    def read_all(self, name: str, ranks: Sequence[int]) -> dict[int, Any]:
        """Returns the notes that exist, by rank."""
        found = {rank: self.read(f"{name}/{rank}") for rank in ranks}
        return {rank: note for rank, note in found.items() if note is not None}

    def wait(self, name: str, ranks: Sequence[int], limit_s: float, doing: str = "") -> list[int]:
        """Waits for a note of each site; returns the ranks of those that have not written."""
        began_s = time.monotonic()
        missing = list(ranks)
        while missing := [rank for rank in missing if self.read(f"{name}/{rank}") is None]:
            self.tell(doing or f"waiting for {named(missing)}")
            waited_s = time.monotonic() - began_s
            if waited_s >= limit_s:
                break
            time.sleep(min(limit_s - waited_s, 0.001 + waited_s / 10, 0.2))
        return missing


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """This site's rank, and the address of the rendezvous."""

    rank: int
    sites: int
    host: str  # name or address of the machine that holds the store
    port: int
    hosted: bool = False  # another process, e.g. torchrun's agent, serves the store already
    attempt: int = 0  # number of restarts by torchrun
    by_hand: bool = False  # each site has a terminal of its own, where somebody waits for a word

    def __post_init__(self) -> None:
        if self.sites < 2:
            raise RecipeError("one site alone has nobody to meet: leave out --rank and --master")
        if not 0 <= self.rank < self.sites:
            raise RecipeError(
                f"rank {self.rank} is not one of {self.sites} sites: they are numbered from 0 to "
                f"{self.sites - 1}"
            )

    def __str__(self) -> str:
        return str(Address(self.host, self.port))


def meeting_from(environment: Mapping[str, str]) -> Meeting:
    """Returns the meeting that torchrun, or the user, has described in the environment."""
    if not environment.get("MASTER_ADDR"):
        raise RecipeError("RANK is set but MASTER_ADDR is not: set it to the address of site 0")

    def integer(name: str, default: str = "") -> int:
        text = environment.get(name, default)
        try:
            return int(text)
        except ValueError:
            raise RecipeError(f"{name} must be a whole number, not {text!r}") from None

    return Meeting(
        rank=integer("RANK"),
        sites=integer("WORLD_SIZE"),
        host=master_host(environment),
        port=integer("MASTER_PORT", str(PORT)),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=integer("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def meeting_at(master: str, rank: int, sites: int) -> Meeting:
    """Parses ``--master``, e.g. ``10.0.0.1:29500`` or ``[fd00::1]``."""
    try:
        host, port = read_address(master, PORT, called="--master=")
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if port == 0:
        raise RecipeError(f"--master={master!r} has port 0, at which nobody listens: try {PORT}")
    return Meeting(rank=rank, sites=sites, host=host, port=port, by_hand=True)


def open_store(meeting: Meeting, timeout_s: float, tell: Tell = lambda _: None) -> Store:
    """Opens the store at site 0, or connects to it from another site within some seconds."""
    until_s = time.monotonic() + timeout_s
    store = None
    if meeting.rank == 0 and not meeting.hosted:
        # Its own client uses the loopback; below it finds out whether the address leads here, too.
        said = f"site 0 cannot listen on port {meeting.port}: another program has it"
        remedy = "end that program, or choose another port at every site"
        store = _tcp_store(loopback(), meeting.port, UnmetError(said, remedy), serves=True)
    tell(f"trying to reach {meeting}")
    answers = ""
    while True:
        limit_s = max(0.1, min(until_s - time.monotonic(), _STORE_S))
        try:
            with suppress(ConnectionResetError):  # somebody is there
                answers = _answering(meeting, limit_s)
            break
        except OSError as error:
            if time.monotonic() + _RETRY_S > until_s:
                raise UnmetError(*why_unreachable(meeting, error, timeout_s)) from error
        time.sleep(_RETRY_S)
    if store is None:
        unmet = UnmetError(*why_no_store(meeting, answers))
        store = _tcp_store(meeting.host, meeting.port, unmet)
    return PrefixStore(f"outergrad-doctor/{meeting.attempt}", store)


def _answering(meeting: Meeting, limit_s: float) -> str:
    """Returns which address of site 0 answers; empty if it hangs up at once."""
    line = socket.create_connection((meeting.host, meeting.port), limit_s)
    with line, suppress(OSError):
        return line.getpeername()[0]
    return ""


def _tcp_store(host: str, port: int, unmet: UnmetError, *, serves: bool = False) -> Store:
    limit = timedelta(seconds=_STORE_S)
    try:
        return bounded(
            lambda: TCPStore(host, port, None, serves, limit, wait_for_workers=False), 3 * _STORE_S
        )
    except (RuntimeError, TimeoutError) as error:
        raise unmet from error


def why_no_store(meeting: Meeting, answers: str) -> tuple[str, str]:
    """Explains why PyTorch finds no store where an address answers; returns that, and a remedy."""
    first = str(socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)[0][4][0])
    if answers not in ("", first):
        said = f"{first}, the first address of {meeting.host}, is silent: PyTorch waits for it in "
        said += f"vain, and does not try {answers}, which answers"
        return said, f"write {answers} instead of the name, at every site"
    said = f"something listens at {meeting}, but it is not site 0 of a training"
    return said, "choose another port at every site, one that no other program uses"


def why_unreachable(meeting: Meeting, error: OSError, timeout_s: float) -> tuple[str, str]:
    """Explains a network error in terms of starting a training; returns explanation and remedy."""
    reason = (error.strerror or str(error)).lower()
    if isinstance(error, TimeoutError):
        reason = "no answer at all"
    if meeting.rank == 0:
        said = f"site 0 cannot reach itself at {meeting} ({reason})"
        return said, "give every site an address of this machine that the others can reach"
    remedy = "see whether the address is right and the machine up, and let TCP port "
    remedy += f"{meeting.port} through its firewall"
    if isinstance(error, socket.gaierror):
        reason = f"the name {meeting.host} is unknown here"
        remedy = "write the number of the address instead of the name, or add it to /etc/hosts"
    elif isinstance(error, ConnectionRefusedError):
        reason = f"that machine answers, but nothing listens on port {meeting.port}"
        remedy = "start site 0, and compare the port; sites may start in any order"
    site = f"site {meeting.rank} cannot reach site 0"
    return f"{site} at {meeting} within {timeout_s:.0f} s: {reason}", remedy


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
        """Returns the description in JSON types, in a form that is independent of versions."""
        findings = [{**vars(finding), "level": finding.level.name} for finding in self.findings]
        return {**vars(self), "findings": findings}


def site_heard(told: dict[str, Any]) -> Site:
    """Returns a site from the form of `Site.told`."""
    findings = [Finding(**{**found, "level": Level[found["level"]]}) for found in told["findings"]]
    return Site(**{**told, "findings": findings})


@dataclass(frozen=True)
class Roll:
    """Sites that came, in order of their ranks, and the ranks of those that did not."""

    sites: Sequence[Site] = ()
    missing: Sequence[int] = ()
    token: str = ""  # identifies connections of this run

    @property
    def ranks(self) -> list[int]:
        """Ranks of the sites that came."""
        return [site.rank for site in self.sites]

    @property
    def machines(self) -> set[str]:
        """Machines of the sites that came."""
        return {site.machine for site in self.sites}


def meet(board: Board, me: Site, timeout_s: float) -> Roll:
    """Announces this site to the others, and waits some seconds for the list of those that came.

    Raises UnmetError if site 0 did not come, or does not list this site.
    """
    first = board.post(f"site/{me.rank}", me.told())
    if first != me.told():
        said = f"two processes say that they are site {me.rank}: one on {first['host']}, "
        remedy = "give every site a number of its own (--rank, or --node-rank of torchrun)"
        raise UnmetError(f"{said}one on {me.host}", remedy)
    everyone = range(board.sites)
    if me.rank == 0:
        missing = board.wait("site", everyone, timeout_s)
        present = [rank for rank in everyone if rank not in missing]
        token = secrets.token_hex(8)
        board.post("roll/0", {"present": present, "missing": missing, "token": token})
    else:
        _wait_for_roll(board, me, timeout_s)
    told = board.read("roll/0")
    sites = [site_heard(board.read(f"site/{rank}")) for rank in told["present"]]
    return Roll(sites, told["missing"], told["token"])


def _wait_for_roll(board: Board, me: Site, timeout_s: float) -> None:
    if board.wait("site", [0], timeout_s):
        came = board.read_all("site", range(1, board.sites))
        absent = [rank for rank in range(board.sites) if rank not in came]
        raise UnmetError(*not_come(absent, timeout_s))
    if (expected := board.read("site/0")["sites"]) != me.sites:
        said = f"site {me.rank} expects {me.sites} sites, site 0 expects {expected}"
        raise UnmetError(said, _SAME_NUMBER)
    if board.wait("roll", [0], timeout_s + _GRACE_S, doing="waiting for the other sites"):
        said = "site 0 came, but has stopped answering"
        raise UnmetError(said, "look at site 0's terminal, and start all sites again")
    if me.rank not in board.read("roll/0")["present"]:
        said = f"site {me.rank} came after site 0 had stopped waiting"
        raise UnmetError(said, "start all sites again, or wait longer with --timeout")


def not_come(ranks: Sequence[int], timeout_s: float) -> tuple[str, str]:
    """Returns explanation and remedy for sites that have not come."""
    said = f"{named(ranks)} did not come within {timeout_s:.0f} s"
    remedy = "start it there, or wait longer with --timeout; if it is running, see what it says"
    return said, remedy


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
    """Measures the clock against site 0's; site 0 answers all sites in turn, and returns None.

    Site 0 answers at an unknown time between question and receipt. So the fastest of several
    exchanges counts, and half its duration is the uncertainty. None without an answer.
    """
    if board.rank == 0:
        for rank in ranks[1:]:
            board.post(f"clock/{rank}", "ask")
            for turn in range(_QUESTIONS):
                if board.wait(f"question-{turn}", [rank], _ANSWER_S):
                    break
                board.post(f"answer-{turn}/{rank}", clock())
        return None
    if board.wait("clock", [board.rank], 15.0 * len(ranks)):
        return None
    offsets = []
    for turn in range(_QUESTIONS):
        asked_s = clock()
        board.post(f"question-{turn}/{board.rank}", "what time is it?")
        if board.wait(f"answer-{turn}", [board.rank], _ANSWER_S):
            return None
        heard_s = clock()
        answer_s = board.read(f"answer-{turn}/{board.rank}")
        offsets.append(Offset((asked_s + heard_s) / 2 - answer_s, (heard_s - asked_s) / 2))
    return min(offsets, key=lambda offset: offset.uncertain_s)


def check_sizes(sites: Sequence[Site]) -> Iterator[Finding]:
    """Checks that all sites expect the same number of sites."""
    first = sites[0]
    for site in sites:
        if site.sites != first.sites:
            said = f"site {site.rank} expects {site.sites} sites, site {first.rank} {first.sites}"
            yield problem("meeting", said, _SAME_NUMBER)


def check_versions(sites: Sequence[Site]) -> Iterator[Finding]:
    """Checks that all sites have the same versions; names those that differ from most."""
    same, differing = [], {}
    for name, version in sites[0].versions.items():
        ranks = defaultdict[str, list[int]](list)
        for site in sites:
            ranks[site.versions.get(name, "none")].append(site.rank)
        if len(ranks) == 1:
            same.append(f"{name} {version}")
        else:
            differing[name] = sorted(ranks.items(), key=lambda item: len(item[1]), reverse=True)
    if same:
        yield ok("versions", f"the same at all sites: {', '.join(same)}")
    for name, found in differing.items():
        usual, *odd = [
            f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'} {version}"
            for version, ranks in found
        ]
        said = f"{'; '.join(odd)} where {usual}"
        if name in _SAME_MATTERS:
            yield problem(name, said, f"install the same version of {name} everywhere")
        else:
            yield note(name, said, f"training works, but the same {name} everywhere is safer")


def check_clocks(offsets: Mapping[int, Offset | None]) -> Iterator[Finding]:
    """Checks each site's clock against site 0's; offsets are by rank."""
    close_s = []
    for rank, offset in offsets.items():
        if offset is None:
            yield note("clocks", f"site {rank}'s was not measured: it did not answer in time")
            continue
        apart_s, side = abs(offset.seconds), "ahead of" if offset.seconds > 0 else "behind"
        said = f"site {rank} is {apart_s:,.1f} s {side} site 0"
        if apart_s - offset.uncertain_s > _APART_S:
            said += ": training does not mind, but logs cannot be compared and certificates may be "
            said += "refused"
            remedy = "set the clock by the network, as with `timedatectl set-ntp true`"
            yield warning("clocks", said, remedy)
        elif apart_s - offset.uncertain_s > _CLOSE_S:
            yield note("clocks", f"{said}: seen in logs alone")
        else:
            close_s.append(apart_s + offset.uncertain_s)
    if len(close_s) == len(offsets):
        within = f"{1e3 * max(close_s, default=0.0):.1f} ms"
        yield ok("clocks", f"all within {within} of site 0's")


def check_sharing(sites: Sequence[Site]) -> Iterator[Finding]:
    """Reports sites that share a machine."""
    machines = Counter(site.machine for site in sites)
    shared = ", ".join(f"{n} sites on {machine}" for machine, n in machines.items() if n > 1)
    if len(machines) == 1:
        yield note("machines", f"all sites are on one machine, {sites[0].host}: a rehearsal")
    elif shared:
        remedy = "one site per machine exchanges least: use its GPUs within the site"
        yield warning("machines", f"{shared}: they share its link to the others", remedy)
