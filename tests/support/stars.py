"""Stars for tests: a hub in this process, and sites that are threads."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import outergrad as og
from outergrad.star.backend.group import StarGroup
from outergrad.star.backend.store import HubStore
from outergrad.star.folder import HubFolder
from outergrad.star.server import HubServer

NAMES = tuple(f"site-{letter}" for letter in "abcd")
CPU = torch.device("cpu")


@cache
def folder() -> HubFolder:
    """Of all hubs of a test session, with four sites."""
    made = HubFolder(Path(tempfile.mkdtemp(prefix="outergrad-hub-")))
    made.create("localhost:8443", ["127.0.0.1"])
    for name in NAMES:
        made.invite(name).write(kit_of(name, made))
    return made


def kit_of(name: str, of: HubFolder | None = None) -> Path:
    """Its file."""
    return (of or folder()).path / f"{name}.kit"


@contextmanager
def hub(sites: int | Sequence[str], **settings: Any) -> Iterator[HubServer]:
    """That listens on a port of its own."""
    names = NAMES[:sites] if isinstance(sites, int) else sites
    server = HubServer(folder(), "127.0.0.1:0", names, **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def star(server: HubServer, rank: int, port: int | None = None, **settings: Any) -> og.Star:
    """A site's transport."""
    settings = {"kit": kit_of(NAMES[rank]), **settings}
    return og.Star(f"127.0.0.1:{port or server.port}", **settings)


def on_star(
    sites: int, body: Callable[[int, og.Star], Any], settings: dict[str, Any] | None = None
) -> list[Any]:
    """Runs body(rank, transport) on every site."""
    with hub(sites) as server:
        stars = [star(server, rank, **settings or {}) for rank in range(sites)]
        try:
            with ThreadPoolExecutor(sites, "star site") as threads:
                return list(threads.map(body, range(sites), stars))
        finally:
            for one in stars:
                one.close()


def on_star_with_a_line(
    sites: int, body: Callable[[int, og.Star, Callable[[bool], None]], Any], **settings: Any
) -> list[Any]:
    """Runs body(rank, transport, line) on every site; `line(False)` cuts that of the last one."""
    with hub(sites, grace_s=0.3) as server:
        proxy = Proxy(server.port)

        def line(is_up: bool) -> None:
            proxy.is_up = is_up
            if not is_up:
                proxy.cut()

        ports = [None] * (sites - 1) + [proxy.port]
        settings = {"when_lost": "go on", **settings}
        stars = [star(server, rank, port, **settings) for rank, port in enumerate(ports)]
        try:
            with ThreadPoolExecutor(sites) as threads:
                return list(threads.map(body, range(sites), stars, [line] * sites))
        finally:
            proxy.is_up = True
            for one in stars:
                one.close()
            proxy.close()


def goes_on_without_the_last(
    steps: Callable[[int], None], is_last: bool, line: Callable[[bool], None], further: int
) -> bool:
    """Cuts the line of the last of `on_star_with_a_line`; True on those that go on without it."""
    if is_last:
        line(False)
        with pytest.raises(og.SiteLostError):
            steps(2)
        return False
    with pytest.raises(og.SitesChangedError):
        steps(2)
    line(True)
    steps(further)
    return True


def comms_on_star(
    sites: int,
    body: Callable[[Any], Any],
    timeout_s: float = 20.0,
    settings: dict[str, Any] | None = None,
) -> list[Any]:
    """Runs body(comm) on every site."""
    timeout = timedelta(seconds=timeout_s)
    return on_star(sites, lambda rank, one: body(one.open(CPU, timeout=timeout)), settings)


def groups_on_star(
    sites: int,
    body: Callable[[StarGroup], Any],
    timeout_s: float = 20.0,
    settings: dict[str, Any] | None = None,
) -> list[Any]:
    """Runs body(group) on every site, with a process group of all sites."""
    return on_star(sites, lambda _, one: body(group_on(one, timeout_s)), settings)


def group_on(
    one: og.Star, timeout_s: float = 20.0, name: str = "all", ranks: Sequence[int] | None = None
) -> StarGroup:
    """A process group of some sites, or of all."""
    held, limit = one.connected(timeout_s), timedelta(seconds=timeout_s)
    ranks = range(len(held.line.names)) if ranks is None else ranks
    return StarGroup(held, name, ranks, limit, HubStore(held, limit))


class Proxy:
    """A network between a site and the hub, which can be cut, go silent, and come back.

    Args:
        port: of the hub.
    """

    def __init__(self, port: int) -> None:
        self._to, self._open, self._lock = port, [], threading.Lock()
        self.is_up, self.is_silent, self.carried = True, False, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Closes all connections."""
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            self._open.clear()

    def close(self) -> None:
        """For good."""
        self.is_up = False
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if not self.is_up:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._to))
                with self._lock:
                    self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.is_silent:
                    time.sleep(0.01)
                target.sendall(data)
                self.carried += len(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
