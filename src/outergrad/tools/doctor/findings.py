"""Findings of checks: a level, a sentence, and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial


class Level(IntEnum):
    """Severity of a finding; only a problem keeps sites from training."""

    OK = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclass(frozen=True)
class Finding:
    """A result of a check."""

    level: Level
    what: str  # subject of the check, in a word or two
    said: str  # result, one sentence
    remedy: str = ""  # what the user should do, if anything


ok = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)


def merged(findings_S: Sequence[Sequence[Finding]], ranks: Sequence[int]) -> list[Finding]:
    """Merges several sites' findings about themselves, naming the sites where not all have one."""
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
