"""Sites as threads that meet through a file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from outergrad_lab.bench.trainer import Meeting

T = TypeVar("T")


def at_every_site(path: Path, sites: int, body: Callable[[Meeting], T]) -> list[T]:
    """Runs body(meeting) at every site; returns the results in their order."""
    with ThreadPoolExecutor(sites) as pool:
        return list(pool.map(body, [Meeting(path, site, sites) for site in range(sites)]))
