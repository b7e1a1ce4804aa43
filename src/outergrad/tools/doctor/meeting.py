"""Meeting of the sites: notes in a common store, attendance, and how the sites differ."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import (  # pyright: ignore[reportPrivateImportUsage]
    DistStoreError,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from outergrad.launch.errors import RecipeError
from outergrad.tools.doctor.findings import Finding, heard, named, note, ok, problem, warning

T = TypeVar("T")
Tell = Callable[[str], None]
"""Callback for progress: called with what a site does or waits for."""

_ANSWER_S = 10.0
"""Longest time for the store to answer."""


class LostError(RuntimeError):
    """The store does not answer any more."""


def bounded(work: Callable[[], T], limit_s: float) -> T:
    """Runs work in its own thread, and waits no longer than a limit.

    PyTorch's stores and gloo can hang beyond their own timeouts where a peer is stopped, and Ctrl-C
    would not end them.

    Raises:
        TimeoutError: It is not done; the thread is not stopped, and ends with the process.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return outcome.result()


class Board:
    """A site's access to the notes. Every wait has a limit."""

    def __init__(self, store: Store, rank: int, sites: int) -> None:
        self.store, self.rank, self.sites = store, rank, sites
        self._lost: LostError | None = None
        store.set_timeout(timedelta(seconds=_ANSWER_S))

    def post(self, key: str, value: Any) -> None:
        """Writes a note, whose value is of JSON's types."""
        self._asked(lambda: self.store.set(key, json.dumps(value)))

    def count(self, key: str) -> int:
        """Increments a counter, and returns its new value."""
        return self._asked(lambda: self.store.add(key, 1))

    def has(self, key: str) -> bool:
        """True if there is such a note."""
        return self._asked(lambda: self.store.check([key]))

    def read(self, key: str) -> Any:
        """Returns a note; raises TimeoutError if it does not come within some seconds."""
        return json.loads(self._asked(lambda: self.store.get(key)))

    def await_note(self, key: str) -> None:
        """Waits for a note, without polling; raises TimeoutError after some seconds."""
        self._asked(lambda: self.store.wait([key], timedelta(seconds=_ANSWER_S)))

    def read_all(self, prefix: str, ranks: Sequence[int]) -> dict[int, Any]:
        """Returns the notes that exist, by rank; the note of site 2 is ``prefix/2``."""
        return {r: self.read(key) for r in ranks if self.has(key := f"{prefix}/{r}")}

    def wait(
        self, prefix: str, ranks: Sequence[int], limit_s: float, tell: Tell = lambda _: None
    ) -> list[int]:
        """Waits for a note of each site; the note of site 2 is ``prefix/2``.

        Returns:
            The ranks of sites that have not written.
        """
        until_s = time.monotonic() + limit_s
        missing = list(ranks)
        while missing := [rank for rank in missing if not self.has(f"{prefix}/{rank}")]:
            tell(f"waiting for {named(missing)}")
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(left_s, 0.02 + 0.02 * (limit_s - left_s), 0.2))
        return missing

    def _asked(self, ask: Callable[[], T]) -> T:
        if self._lost:
            raise self._lost
        try:
            return bounded(ask, _ANSWER_S + 1)
        except DistStoreError as error:
            raise TimeoutError(f"no note within {_ANSWER_S:.0f} s") from error
        except (RuntimeError, TimeoutError) as error:
            self._lost = LostError(str(error).splitlines()[0])
            raise self._lost from error


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


PORT = 29500
"""PyTorch's default port."""

_RETRY_S = 0.3
_STORE_S = 5.0
_GRACE_S = 5.0
"""Seconds that a site waits for site 0's answer beyond site 0's own wait for the others."""


class UnmetError(RuntimeError):
    """This site has not met the others; the finding says why."""

    def __init__(self, said: str, remedy: str) -> None:
        super().__init__(said)
        self.finding = problem("meeting", said, remedy)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """This site's rank, and the address of the rendezvous."""

    rank: int
    sites: int
    host: str  # name or address of the machine that holds the store
    port: int
    hosted: bool = False  # another process, e.g. torchrun's agent, serves the store already
    attempt: int = 0  # number of restarts by torchrun

    def __post_init__(self) -> None:
        if self.sites < 2:
            raise RecipeError("one site alone has nobody to meet: leave out --rank and --master")
        if not 0 <= self.rank < self.sites:
            raise RecipeError(
                f"rank {self.rank} is not one of {self.sites} sites: they are numbered from 0 to "
                f"{self.sites - 1}"
            )

    @property
    def place(self) -> str:
        """Address as text."""
        return f"{self.host}:{self.port}"


def meeting_from(environment: Mapping[str, str]) -> Meeting:
    """Returns the meeting that torchrun, or the user, has described in the environment.

    Raises:
        RecipeError: A variable is missing or cannot be parsed.
    """
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
        host=environment["MASTER_ADDR"],
        port=integer("MASTER_PORT", str(PORT)),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=integer("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def meeting_at(master: str, rank: int, sites: int) -> Meeting:
    """Parses ``--master``, e.g. ``10.0.0.1:29500``.

    Raises:
        RecipeError: It cannot be parsed.
    """
    host, _, port = master.rpartition(":") if ":" in master else (master, "", str(PORT))
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RecipeError(f"--master must look like 10.0.0.1:{PORT}, not {master!r}")
    return Meeting(rank=rank, sites=sites, host=host.strip("[]"), port=int(port))


def open_store(meeting: Meeting, timeout_s: float, tell: Tell = lambda _: None) -> Store:
    """Opens the store at site 0, or connects to it from another site within some seconds.

    Raises:
        UnmetError: It cannot; the finding has the remedy.
    """
    until_s = time.monotonic() + timeout_s
    holds = meeting.rank == 0 and not meeting.hosted
    # Site 0's own client uses 127.0.0.1; `_knock` then checks that the address leads here.
    store = _tcp_store(meeting, "127.0.0.1") if holds else None
    tell(f"trying to reach {meeting.place}")
    while error := _knock(meeting, until_s - time.monotonic()):
        if time.monotonic() + _RETRY_S > until_s:
            raise UnmetError(*why_unreachable(meeting, error, timeout_s)) from error
        time.sleep(_RETRY_S)
    return PrefixStore(f"outergrad-doctor/{meeting.attempt}", store or _tcp_store(meeting))


def _tcp_store(meeting: Meeting, serving: str = "") -> Store:
    host, port, limit = serving or meeting.host, meeting.port, timedelta(seconds=_STORE_S)
    try:
        return bounded(
            lambda: TCPStore(host, port, None, bool(serving), limit, wait_for_workers=False),
            3 * _STORE_S,
        )
    except (RuntimeError, TimeoutError) as error:
        if serving:
            said = f"site 0 cannot listen on port {port}: another program has it"
            remedy = "end that program, or choose another port at every site"
        else:
            said = f"something listens at {meeting.place}, but it is not site 0 of a training"
            remedy = "choose another port at every site, one that no other program uses"
        raise UnmetError(said, remedy) from error


def _knock(meeting: Meeting, limit_s: float) -> OSError | None:
    """Error if nothing listens at the address within the limit, else None."""
    address, limit_s = (meeting.host, meeting.port), max(0.1, min(limit_s, 5))
    try:
        with suppress(ConnectionResetError):
            socket.create_connection(address, timeout=limit_s).close()
    except OSError as error:
        return error
    return None


def why_unreachable(meeting: Meeting, error: OSError, timeout_s: float) -> tuple[str, str]:
    """Explains a network error in terms of starting a training; returns explanation and remedy."""
    reason = (error.strerror or str(error)).lower()
    if isinstance(error, TimeoutError):
        reason = "no answer at all"
    if meeting.rank == 0:
        said = f"site 0 cannot reach itself at {meeting.place} ({reason})"
        return said, "give every site an address of this machine that the others can reach"
    said = f"site {meeting.rank} cannot reach site 0 at {meeting.place} within {timeout_s:.0f} s: "
    if isinstance(error, socket.gaierror):
        said += f"the name {meeting.host} is unknown here"
        return said, "write the number of the address instead of the name, or add it to /etc/hosts"
    if isinstance(error, ConnectionRefusedError):
        said += f"that machine answers, but nothing listens on port {meeting.port}"
        return said, "start site 0, and compare the port; sites may start in any order"
    remedy = "see whether the address is right and the machine up, and let TCP port "
    return said + reason, f"{remedy}{meeting.port} through its firewall"


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


def meet(board: Board, me: Site, timeout_s: float, tell: Tell) -> Roll:
    """Announces this site to the others, and waits some seconds for the list of those that came.

    Raises:
        UnmetError: Site 0 did not come, or does not list this site.
    """
    if board.count(f"came/{me.rank}") > 1:
        said = f"two processes say that they are site {me.rank}: one on "
        said += f"{board.read(f'site/{me.rank}')['host']}, one on {me.host}"
        remedy = "give every site a number of its own (--rank, or --node-rank of torchrun)"
        raise UnmetError(said, remedy)
    board.post(f"site/{me.rank}", me.told())
    (_call if me.rank == 0 else _hear)(board, me, timeout_s, tell)
    told = board.read("roll/0")
    sites = [site_heard(board.read(f"site/{rank}")) for rank in told["present"]]
    return Roll(sites, told["missing"], told["token"])


def _call(board: Board, me: Site, timeout_s: float, tell: Tell) -> None:
    missing = board.wait("site", range(board.sites), timeout_s, tell)
    present = [rank for rank in range(board.sites) if rank not in missing]
    board.post("roll/0", {"present": present, "missing": missing, "token": secrets.token_hex(8)})


def _hear(board: Board, me: Site, timeout_s: float, tell: Tell) -> None:
    if board.wait("site", [0], timeout_s, tell):
        absent = [r for r in range(board.sites) if r == 0 or not board.has(f"site/{r}")]
        raise UnmetError(*not_come(absent, timeout_s))
    if (expected := board.read("site/0")["sites"]) != me.sites:
        said = f"site {me.rank} expects {me.sites} sites, site 0 expects {expected}"
        raise UnmetError(said, SAME_NUMBER)
    waited_s = timeout_s + _GRACE_S
    if board.wait("roll", [0], waited_s, lambda _: tell("waiting for the other sites")):
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
