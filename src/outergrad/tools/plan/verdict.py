"""Verdict on the methods: only what the shown figures support."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from outergrad._amounts import times
from outergrad.launch.links import ShapedLink
from outergrad.tools.plan.comparison import DENSE, Comparison, Standing, as_range, in_ms
from outergrad.tools.plan.interval import EVEN, Interval

FEWER = " x fewer bytes"
UNTOLD = "cannot be told on this machine now"
HIGHEST_BIT_PER_S = 100e9
"""Highest link rate that is considered."""
BUSY = 0.1
"""Share of time without a processor from which on it is worth a word."""
LEAST_SECONDS = 15


class Pays(Enum):
    """Relation of the fastest methods of a kind to dense."""

    FASTER = "faster than dense"
    SLOWER = "slower than dense"
    EVEN = "as fast as dense"
    UNTOLD = "untold"


@dataclass(frozen=True)
class Rates:
    """Links on which a method and dense differ for sure.

    Attributes:
        dense_slower_to: Highest rate, in bit/s, up to which dense is slower; None if it is not.
        dense_faster_from: Lowest rate from which on dense is faster; None if there is none.
    """

    dense_slower_to: float | None = None
    dense_faster_from: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Verdict on the methods of one kind, exact or approximate.

    Attributes:
        kind: The kind, in a word.
        leaders: Methods that no other of the kind is faster than for sure.
        step_s: Interval that holds the steps of all of these.
        speed: How many times as fast as dense they are.
    """

    kind: str
    leaders: tuple[Standing, ...]
    step_s: Interval
    speed: Interval

    @property
    def is_told(self) -> bool:
        """True if it says which method is the fastest, or that several are equally fast."""
        return len(self.leaders) == 1 or self.step_s.is_even

    @property
    def has_dense(self) -> bool:
        """True if dense is among the leaders."""
        return any(one.method == DENSE for one in self.leaders)

    @property
    def pays(self) -> Pays:
        """Relation of the leaders to dense."""
        if self.speed.low > 1 + EVEN:
            return Pays.FASTER
        if self.speed.high * (1 + EVEN) < 1:
            return Pays.SLOWER
        even = self.speed.low * (1 + EVEN) >= 1 and self.speed.high <= 1 + EVEN
        return Pays.EVEN if even else Pays.UNTOLD

    @property
    def is_settled(self) -> bool:
        """True if no longer look can change it."""
        return self.is_told and (self.has_dense or self.pays != Pays.UNTOLD)


def verdicts(comparison: Comparison) -> list[Verdict]:
    """Returns the verdict on each kind that has a method other than dense."""
    kinds = {"exact": True, "approximate": False}
    found = {
        kind: [one for one in comparison.standings if one.exact == exact]
        for kind, exact in kinds.items()
    }
    return [
        _verdict(comparison, kind, some)
        for kind, some in found.items()
        if any(one.method != DENSE for one in some)
    ]


def _verdict(comparison: Comparison, kind: str, some: Sequence[Standing]) -> Verdict:
    leaders = tuple(
        one for one in some if not any(other.step_s.is_below(one.step_s) for other in some)
    )
    step_s = Interval.around(one.step_s for one in leaders)
    return Verdict(kind, leaders, step_s, comparison.speed(step_s))


def sentences(
    comparison: Comparison, rates_of: Callable[[str], Rates], link: ShapedLink
) -> Iterator[str]:
    """Yields which methods pay, by how much and on which links, and what they show.

    Args:
        comparison: The figures.
        rates_of: Returns the rates of a method, given its name.
        link: Link of each site.
    """
    for verdict in verdicts(comparison):
        faster = verdict.leaders if verdict.pays == Pays.FASTER else ()
        parts = (
            f"Of the {verdict.kind} methods {_fastest(verdict)}{_beside_dense(verdict)}"
            f"{_bytes(comparison, verdict)}.",
            _links([rates_of(one.method) for one in faster], link),
            _learnt(verdict),
        )
        yield " ".join(filter(None, parts))


def _fastest(verdict: Verdict) -> str:
    names, took = [one.method for one in verdict.leaders], f"{in_ms(verdict.step_s, ' to ')} ms"
    if len(names) == 1:
        return f"{names[0]} is the fastest, {took} a step"
    if verdict.is_told:
        return f"{_listed(names, 'and')} are equally fast, {took} a step"
    return f"the fastest {UNTOLD}: {_listed(names, 'or')}, {took} a step"


def _beside_dense(verdict: Verdict) -> str:
    speed = f"{as_range(verdict.speed, ' to ')} x as fast as dense"
    if verdict.has_dense:
        return "; none pays on this link" if verdict.is_told else ""
    return {
        Pays.FASTER: f", {speed}",
        Pays.SLOWER: f", {speed}; none pays on this link",
        Pays.EVEN: ", as fast as dense; none pays on this link",
        Pays.UNTOLD: f"; if that is faster than dense {UNTOLD}",
    }[verdict.pays]


def _bytes(comparison: Comparison, verdict: Verdict) -> str:
    ratios = [comparison.fewer(one) for one in verdict.leaders if one.method != DENSE]
    told = [_fewer(ratio) for ratio in ratios]
    if len(set(told)) == 1:
        return f", with {told[0]}"
    if all(words.endswith(FEWER) for words in told):
        return f", with {_listed([*map(times, ratios)], 'and')}{FEWER}" if told else ""
    return f", with {_listed(told, 'and')}"


def _fewer(fewer: float) -> str:
    if times(fewer) == times(1):
        return "as many bytes"
    return f"{times(fewer)}{FEWER}" if fewer > 1 else f"{times(1 / fewer)} x more bytes"


def _links(rates: Sequence[Rates], link: ShapedLink) -> str:
    """Links on which dense is slower than each of some methods, and those on which it is faster."""
    slower_to = [one.dense_slower_to for one in rates if one.dense_slower_to is not None]
    if link.rate_bit_per_s is None or not rates or len(slower_to) < len(rates):
        return ""
    up_to = _rate(max(link.rate_bit_per_s, _two_digits(min(slower_to), 0)))
    faster_from = [one.dense_faster_from for one in rates if one.dense_faster_from is not None]
    if len(faster_from) < len(rates):
        return f"Up to {up_to} dense is slower."
    return (
        f"Up to {up_to} dense is slower, from {_rate(_two_digits(max(faster_from), 1))} on faster."
    )


def _two_digits(rate: float, more: int) -> float:
    """Returns a rate with its first two digits, or, with 1 for `more`, the next such rate."""
    unit = 10.0 ** (len(str(int(rate))) - 2)
    return unit * (rate // unit + more)


def _rate(bit_per_s: float) -> str:
    return ShapedLink(rate_bit_per_s=bit_per_s).name


def _learnt(verdict: Verdict) -> str:
    by_words = defaultdict[str, list[str]](list)
    for one in verdict.leaders:
        by_words[one.learnt].append(one.method)
    told = [(_listed(names, "and"), words) for words, names in by_words.items()]
    if len(told) == 1:
        return f"The other sites learn {told[0][1]}."
    return " ".join(f"By {names} the other sites learn {words}." for names, words in told)


def _listed(names: Sequence[str], last: str) -> str:
    if len(names) < 2:
        return names[0]
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def how_to_look_longer(comparison: Comparison, seconds: float, busy: float) -> Iterator[str]:
    """Yields advice where something cannot be told.

    Args:
        comparison: The figures.
        seconds: Seconds for which steps were repeated.
        busy: Share of the steps in which the training thread had no processor.
    """
    if all(verdict.is_settled for verdict in verdicts(comparison)):
        return
    if busy > BUSY:
        yield f"For {busy:.0%} of their time steps waited for a processor: other programs had it."
    longer = f"--seconds {4 * max(seconds, LEAST_SECONDS):g}"
    yield f"To tell more, repeat it while the machine does nothing else, or for longer: {longer}."
