"""What a check has found: a level, a sentence, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Level(IntEnum):
    """How much a finding matters; only a problem keeps sites from training."""

    OK = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        level: How much it matters.
        what: What was looked at, in a word or two.
        said: What was found, one sentence.
        remedy: What the user should do, if anything.
    """

    level: Level
    what: str
    said: str
    remedy: str = ""

    def told(self) -> dict[str, Any]:
        """The finding as JSON can hold it."""
        return {**vars(self), "level": self.level.name}


def heard(told: dict[str, Any]) -> Finding:
    """The finding that another site told."""
    return Finding(**{**told, "level": Level[told["level"]]})


def ok(what: str, said: str) -> Finding:
    """A check that found nothing to complain of."""
    return Finding(Level.OK, what, said)


def note(what: str, said: str, remedy: str = "") -> Finding:
    """What is good to know."""
    return Finding(Level.NOTE, what, said, remedy)


def warning(what: str, said: str, remedy: str) -> Finding:
    """What will probably cost time or nerves."""
    return Finding(Level.WARNING, what, said, remedy)


def problem(what: str, said: str, remedy: str) -> Finding:
    """What keeps sites from training."""
    return Finding(Level.PROBLEM, what, said, remedy)


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level of all."""
    return max((finding.level for finding in findings), default=Level.OK)


def of_level(findings: Iterable[Finding], level: Level) -> list[Finding]:
    """Those of one level, in order."""
    return [finding for finding in findings if finding.level == level]


def merged(findings_S: Sequence[Sequence[Finding]], ranks: Sequence[int]) -> list[Finding]:
    """Findings of several sites, each told once, with the sites that have it.

    Args:
        findings_S: What each site found about itself.
        ranks: The sites' numbers, in the same order.
    """
    having: dict[Finding, list[int]] = {}
    for rank, findings in zip(ranks, findings_S, strict=True):
        for finding in findings:
            having.setdefault(finding, []).append(rank)
    everywhere = list(ranks)
    return [
        finding if found == everywhere else _at(finding, found) for finding, found in having.items()
    ]


def _at(finding: Finding, ranks: Sequence[int]) -> Finding:
    return Finding(finding.level, finding.what, f"{named(ranks)}: {finding.said}", finding.remedy)


def named(ranks: Sequence[int]) -> str:
    """Names sites for a reader, as ``sites 1, 2 and 5``."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"site {numbers[0]}"
    return f"sites {', '.join(numbers[:-1])} and {numbers[-1]}"
