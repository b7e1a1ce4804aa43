"""What a check has found: a level, a sentence, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any


class Level(IntEnum):
    """How much a finding matters; only a problem keeps sites from training."""

    OK = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    level: Level
    what: str  # was looked at, in a word or two
    said: str  # what was found, one sentence
    remedy: str = ""  # what the user should do, if anything

    def told(self) -> dict[str, Any]:
        """The finding as JSON can hold it, which sites with other versions can read."""
        return {**vars(self), "level": self.level.name}


ok = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)


def heard(told: dict[str, Any]) -> Finding:
    """The finding that another site told."""
    return Finding(**{**told, "level": Level[told["level"]]})


def merged(findings_S: Sequence[Sequence[Finding]], ranks: Sequence[int]) -> list[Finding]:
    """Findings of several sites about themselves, each told once, with the sites that have it."""
    having: dict[Finding, list[int]] = {}
    for rank, findings in zip(ranks, findings_S, strict=True):
        for finding in findings:
            having.setdefault(finding, []).append(rank)
    return [
        finding if found == [*ranks] else replace(finding, said=f"{named(found)}: {finding.said}")
        for finding, found in having.items()
    ]


def named(ranks: Sequence[int]) -> str:
    """Names sites for a reader, as ``sites 1, 2 and 5``."""
    *others, last = map(str, ranks)
    return f"sites {', '.join(others)} and {last}" if others else f"site {last}"
