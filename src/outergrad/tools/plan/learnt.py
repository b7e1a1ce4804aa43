"""Information that a method gives to the other sites, in words."""

from __future__ import annotations

from collections import Counter
from math import prod

from outergrad.record.coverage import Coverage

NOTHING = "nothing"


def learnt_by_others(coverage: Coverage) -> str:
    """Sums up the last column of a coverage table, the most parameters first."""
    numbers = Counter[str]()
    for line in coverage:
        numbers[line.reveals] += prod(line.shape)
    del numbers[NOTHING]
    if not numbers:
        return NOTHING
    total = sum(numbers.values())
    if len(numbers) == 1:
        return next(iter(numbers))
    (first, most), *others = numbers.most_common()
    told = [f"{first} ({_percent(most / total)} of the weights)"]
    return "; ".join([*told, *(f"{of} ({_percent(n / total)})" for of, n in others)])


def _percent(share: float) -> str:
    """Formats a share of something that has other parts, too: never as 0% or 100%."""
    if share < 0.01:
        return "less than 1%"
    return "more than 99%" if share > 0.99 else f"{share:.0%}"
