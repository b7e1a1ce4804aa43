"""Stars for tests: a hub in this process, and sites that are threads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch

import outergrad as og
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
    return og.Star(f"127.0.0.1:{port or server.port}", kit=kit_of(NAMES[rank]), **settings)


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


def comms_on_star(sites: int, body: Callable[[Any], Any], timeout_s: float = 20.0) -> list[Any]:
    """Runs body(comm) on every site."""
    timeout = timedelta(seconds=timeout_s)
    return on_star(sites, lambda rank, one: body(one.open(CPU, timeout=timeout)))
