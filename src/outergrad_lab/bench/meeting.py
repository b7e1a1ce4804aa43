"""Synchronisation of the sites of a benchmark without the network that is measured."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

PATIENCE = timedelta(hours=2)
"""Timeout above the slowest step of the slowest link; a site that dies ends the others at once."""

HEAD_START_S = 0.03
"""Seconds to read in the file when to start: sites look at it every 10 ms."""


class Meeting:
    """Barriers and agreements through a file that all sites can see.

    Every site must call the same methods in the same order.
    """

    def __init__(self, path: Path, site: int, sites: int) -> None:
        """Opens the file at one of the sites."""
        self.site, self.sites = site, sites
        self._store = dist.FileStore(str(path), sites)  # pyright: ignore[reportPrivateImportUsage]
        self._store.set_timeout(PATIENCE)
        self._count = 0

    def barrier(self) -> None:
        """Waits until every site is here."""
        key = self._next()
        if self._store.add(key, 1) == self.sites:
            self._store.set(f"{key}/all", "")
        self._store.get(f"{key}/all")

    def start(self) -> None:
        """Waits until every site is here, and lets all go at the same moment.

        After a barrier alone the first site would go up to 10 ms before the last, while a step of a
        small model may take no longer.
        """
        self.barrier()
        moment_s = self.told(time.monotonic() + HEAD_START_S)  # all processes share this clock
        time.sleep(max(0.0, moment_s - time.monotonic()))

    def told(self, answer: float | None = None) -> float:
        """Returns site 0's answer at every site."""
        key = self._next()
        if self.site == 0:
            assert answer is not None
            self._store.set(key, repr(float(answer)))
        return float(self._store.get(key))

    def _next(self) -> str:
        self._count += 1
        return str(self._count)
