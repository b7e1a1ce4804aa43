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
    (first, _), *others = numbers.most_common()
    rest = "; ".join(f"of {_percent(n / total)} of the weights: {of}" for of, n in others)
    return f"{first} ({rest})" if rest else first


def _percent(share: float) -> str:
    return "less than 1%" if share < 0.01 else f"{share:.0%}"
