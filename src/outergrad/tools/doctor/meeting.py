"""Rendezvous of the sites: address of the store, connection to it, and attendance."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from outergrad.launch.errors import RecipeError
from outergrad.tools.doctor.board import Board, Tell, bounded
from outergrad.tools.doctor.findings import named, problem
from outergrad.tools.doctor.sites import SAME_NUMBER, Site, site_heard

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
