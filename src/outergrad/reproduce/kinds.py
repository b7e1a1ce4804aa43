"""The kinds of tasks."""

from __future__ import annotations

from outergrad.reproduce.iterations import ITERATIONS
from outergrad.reproduce.sites import SITES
from outergrad.reproduce.task import Kind
from outergrad.reproduce.timing import TIMING

KINDS: dict[str, Kind] = {"timing": TIMING, "sites": SITES, "iterations": ITERATIONS}
