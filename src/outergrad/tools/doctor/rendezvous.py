"""Where the sites meet: the address of the store, and how to get there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from outergrad.launch.errors import RecipeError
from outergrad.tools.doctor.bounded import bounded
from outergrad.tools.doctor.findings import Finding, problem

PORT = 29500
"""PyTorch's own, where none is named."""

_RETRY_S = 0.3
_STORE_S = 5.0


class UnreachableError(RuntimeError):
    """The store cannot be reached; the finding says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.said)
        self.finding = finding


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where this site stands among the others, and where they meet.

    Attributes:
        rank: This site's number.
        sites: How many there are.
        host: Name or address of the machine that holds the store.
        port: Of the store.
        hosted: Whether somebody else, torchrun for one, has opened the store already.
        attempt: How often torchrun has started the sites again.
    """

    rank: int
    sites: int
    host: str
    port: int
    hosted: bool = False
    attempt: int = 0

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
        """The address, for a reader."""
        return f"{self.host}:{self.port}"


def meeting_from(environment: Mapping[str, str]) -> Meeting:
    """Reads what torchrun, or the user, has put into the environment.

    Raises:
        RecipeError: Something is missing or cannot be read.
    """
    if not environment.get("MASTER_ADDR"):
        raise RecipeError("RANK is set but MASTER_ADDR is not: set it to the address of site 0")
    return Meeting(
        rank=_integer(environment, "RANK"),
        sites=_integer(environment, "WORLD_SIZE"),
        host=environment["MASTER_ADDR"],
        port=_integer(environment, "MASTER_PORT", PORT),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_integer(environment, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def meeting_at(master: str, rank: int, sites: int) -> Meeting:
    """Reads ``--master``, as ``10.0.0.1:29500``.

    Raises:
        RecipeError: It cannot be read.
    """
    host, _, port = master.rpartition(":") if ":" in master else (master, "", str(PORT))
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RecipeError(f"--master must look like 10.0.0.1:{PORT}, not {master!r}")
    return Meeting(rank=rank, sites=sites, host=host.strip("[]"), port=int(port))


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise RecipeError(f"{name} must be a whole number, not {text!r}") from None


def open_store(
    meeting: Meeting, timeout_s: float, tell: Callable[[str], None] = lambda _: None
) -> Store:
    """Opens the store at site 0, or reaches it from another.

    Args:
        meeting: Where.
        timeout_s: How long to try.
        tell: Hears what this site waits for.

    Raises:
        UnreachableError: The finding says what to do.
    """
    until_s = time.monotonic() + timeout_s
    holds = meeting.rank == 0 and not meeting.hosted
    server = _served(meeting) if holds else None
    tell(f"trying to reach {meeting.place}")
    _await_port(meeting, until_s, timeout_s)
    store = server or _connected(meeting)
    return PrefixStore(f"outergrad-doctor/{meeting.attempt}", store)


def _served(meeting: Meeting) -> Store:
    # Its own client goes through 127.0.0.1: whether the address leads here is looked at after.
    try:
        return _tcp_store("127.0.0.1", meeting.port, serves=True)
    except (RuntimeError, TimeoutError) as error:
        raise UnreachableError(
            problem(
                "meeting",
                f"site 0 cannot listen on port {meeting.port}: another program has it",
                "end that program, or choose another port at every site",
            )
        ) from error


def _connected(meeting: Meeting) -> Store:
    try:
        return _tcp_store(meeting.host, meeting.port, serves=False)
    except (RuntimeError, TimeoutError) as error:
        raise UnreachableError(
            problem(
                "meeting",
                f"something listens at {meeting.place}, but it is not site 0 of a training",
                "choose another port at every site, one that no other program uses",
            )
        ) from error


def _tcp_store(host: str, port: int, *, serves: bool) -> Store:
    limit = timedelta(seconds=_STORE_S)
    return bounded(
        lambda: TCPStore(host, port, None, serves, limit, wait_for_workers=False), 3 * _STORE_S
    )


def _await_port(meeting: Meeting, until_s: float, timeout_s: float) -> None:
    """Waits until somebody listens at the address."""
    while True:
        error = _knock(meeting.host, meeting.port, until_s - time.monotonic())
        if error is None:
            return
        if time.monotonic() + _RETRY_S > until_s:
            raise UnreachableError(why_unreachable(meeting, error, timeout_s)) from error
        time.sleep(_RETRY_S)


def _knock(host: str, port: int, limit_s: float) -> OSError | None:
    try:
        with suppress(ConnectionResetError):
            socket.create_connection((host, port), timeout=max(0.1, min(limit_s, 5))).close()
    except OSError as error:
        return error
    return None


def why_unreachable(meeting: Meeting, error: OSError, timeout_s: float) -> Finding:
    """What an error of the network means for someone who wants to start a training."""
    said = f"site {meeting.rank} cannot reach site 0 at {meeting.place} within {timeout_s:.0f} s"
    if meeting.rank == 0:
        said = f"site 0 cannot reach itself at {meeting.place}"
        here = "give every site an address of this machine that the others can reach"
        return problem("meeting", f"{said} ({_reason(error)})", here)
    if isinstance(error, socket.gaierror):
        return problem(
            "meeting",
            f"{said}: the name {meeting.host} is unknown here",
            "write the number of the address instead of the name, or add it to /etc/hosts",
        )
    if isinstance(error, ConnectionRefusedError):
        return problem(
            "meeting",
            f"{said}: that machine answers, but nothing listens on port {meeting.port}",
            "start site 0, and compare the port; sites may start in any order",
        )
    return problem(
        "meeting",
        f"{said}: {_reason(error)}",
        f"see whether the address is right and the machine up, and let TCP port {meeting.port} "
        "through its firewall",
    )


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer at all"
    return (error.strerror or str(error)).lower()
