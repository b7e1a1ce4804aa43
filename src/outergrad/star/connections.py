"""Limits on the number and the age of a hub's connections without a greeting.

gRPC does not show a connection before its TLS handshake is over, nor count those of an address. So
a hub looks through its process's own sockets. A connection on which a site has greeted is left
alone; any other has a few seconds for all that comes before a greeting, whatever it does meanwhile.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import unquote

GREETING_S = 10.0
"""Seconds from the opening of a connection, or of a stream, to a greeting that can be read."""
_MOST_FILES = 1 << 16
_OWN_FILES = 64
"""Files that are left for everything else: gRPC, the log, the folder."""
_UNKNOWN_FILES = 1 << 10


class Peer(NamedTuple):
    """The other side of a connection."""

    host: str
    port: int


class Connections:
    """The connections of a hub; shuts those that exceed the limits.

    Args:
        told: called for each connection that was shut, with its host and the reason.
        per_address: most connections of one address without a greeting.
        in_all: most connections of all addresses without a greeting.
        patience_s: seconds that a connection may be without a greeting.
    """

    def __init__(
        self,
        told: Callable[[str, str], None],
        per_address: int,
        in_all: int,
        patience_s: float = GREETING_S,
    ) -> None:
        self._told, self._per_address, self._in_all = told, per_address, in_all
        self._patience_s = patience_s
        self._greeted, self._lock = Counter[Peer](), threading.Lock()
        self._since: dict[Peer, float] = {}

    @contextmanager
    def greeted(self, peer: str) -> Iterator[None]:
        """Exempts a connection, named by its peer as in gRPC, while a site is served on it."""
        known = _peer_in(peer)
        with self._lock:
            self._greeted[known] += 1
        try:
            yield
        finally:
            with self._lock:
                self._greeted[known] -= 1
                self._greeted = +self._greeted

    def look(self, port: int) -> None:
        """Shuts connections to `port` that are silent for too long, and the oldest of too many."""
        found = _connections_to(port)
        try:
            for peer, why in self._to_shut(found, time.monotonic()):
                with suppress(OSError):  # it has gone by itself
                    found[peer].shutdown(socket.SHUT_RDWR)
                self._told(peer.host, why)
        finally:
            for one in found.values():
                one.close()

    def _to_shut(self, found: Iterable[Peer], now: float) -> Iterator[tuple[Peer, str]]:
        with self._lock:
            waiting = [peer for peer in found if peer not in self._greeted]
        self._since = {peer: self._since.get(peer, now) for peer in waiting}
        by_address, left = defaultdict[str, int](int), len(waiting)
        for peer in waiting:
            by_address[_network_of(peer.host)] += 1
        for peer in sorted(waiting, key=self._since.__getitem__):  # the oldest first
            network = _network_of(peer.host)
            if now - self._since[peer] > self._patience_s:
                why = f"it sent no greeting within {self._patience_s:g} s"
            elif by_address[network] > self._per_address:
                why = f"more than {self._per_address} connections of its address have not greeted"
            elif left > self._in_all:
                why = f"more than {self._in_all} connections have not greeted"
            else:
                continue
            by_address[network] -= 1
            left -= 1
            yield peer, why


class Pace:
    """A rate limit on the greetings of each site, which does not hold up the others.

    Each greeting by a kit may begin a run and end the one before, which takes work and log lines.

    Args:
        at_once: greetings in a burst that need not wait.
        per_s: greetings per second that need not wait in the long run.
    """

    def __init__(self, at_once: int = 20, per_s: float = 5.0) -> None:
        self._at_once, self._per_s, self._lock = at_once, per_s, threading.Lock()
        self._free_at: dict[str, float] = {}

    def wait_s(self, name: str, now: float | None = None) -> float:
        """Counts a greeting of a site; returns the seconds that it has to wait.

        Args:
            name: of the site.
            now: time by the monotonic clock; None to read it.
        """
        now = time.monotonic() if now is None else now
        with self._lock:
            free_at = max(self._free_at.get(name, 0.0), now - self._at_once / self._per_s)
            free_at = self._free_at[name] = free_at + 1 / self._per_s
        return max(0.0, free_at - now)


def raise_file_limit() -> None:
    """Raises this process's limit of open files above the usual 1,024, if the system allows it."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Returns how many connections the hub may have, so that files are left for all else."""
    files = _file_limit()
    return max(files - _OWN_FILES, files // 2)


def host_in(peer: str) -> str:
    """Returns the address of a peer, as gRPC names it, without the port."""
    return _peer_in(peer).host


def _file_limit() -> int:
    if sys.platform == "win32":
        return _UNKNOWN_FILES
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, _MOST_FILES)


def _connections_to(port: int) -> dict[Peer, socket.socket]:
    """Returns copies of the sockets by which others are connected to a port of this process."""
    found = dict[Peer, socket.socket]()
    for number in _open_files():
        with suppress(OSError):  # it may be closed meanwhile
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            # a copy, because gRPC may close the file meanwhile, and its number may be reused
            one = _socket_of(os.dup(number))
            peer = _other_side(one, port)
            if peer is None or peer in found:
                one.close()
            else:
                found[peer] = one
    return found


def _socket_of(number: int) -> socket.socket:
    try:
        return socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise


def _other_side(one: socket.socket, port: int) -> Peer | None:
    try:
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        is_here = is_tcp and one.getsockname()[1] == port
        return _peer(*one.getpeername()[:2]) if is_here else None
    except OSError:  # it listens, or has ended
        return None


def _open_files() -> list[int]:
    """Returns this process's file descriptors; none where the system does not list them."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return [int(name) for name in os.listdir(folder)]
    return []


def _peer_in(peer: str) -> Peer:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _peer(host.strip("[]"), int(port)) if port.isdigit() else Peer(peer, 0)


def _peer(host: str, port: int) -> Peer:
    """Returns a peer with its address in one form: IPv4 over an IPv6 socket is IPv4."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = address.ipv4_mapped if address.version == 6 else None
        return Peer(str(mapped or address), port)
    return Peer(host, port)


def _network_of(host: str) -> str:
    """Returns the network that one user has: an IPv4 address, or an IPv6 /64."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.version == 6:
            return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return host
