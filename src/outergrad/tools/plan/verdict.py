"""Verdict on the methods: only what the shown figures support."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outergrad._amounts import duration, many, times
from outergrad.launch.links import ShapedLink
from outergrad.tools.plan.comparison import DENSE, Comparison, Standing, as_range, in_ms
from outergrad.tools.plan.interval import EVEN, FEWEST, UNKNOWN, Interval

UNTOLD = "cannot be told on this machine now"
HIGHEST_BIT_PER_S = 100e9
"""Highest link rate that is considered."""
BUSY = 0.1
"""Share of time without a processor from which on it is worth a word."""
LEAST_SECONDS = 15
"""Seconds that are advised at least."""


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


@dataclass(frozen=True, kw_only=True)
class Look:
    """Amount of measuring that the figures come from.

    Attributes:
        rounds: Rounds in which all methods had a turn.
        took_s: Seconds that these took.
        allowed_s: Seconds after which no further round began.
        busy: Share of the steps in which the training thread had no processor.
    """

    rounds: int
    took_s: float
    allowed_s: float
    busy: float


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

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict in JSON types."""
        pays = Pays.EVEN if self.has_dense and self.is_told else self.pays
        return {
            "methods": [one.method for one in self.leaders],
            "told": self.is_told,
            "beside_dense": pays.value,
        }


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
            f"Of the {verdict.kind} methods {_fastest(verdict)}{_beside_dense(verdict)}.",
            _bytes(comparison, verdict),
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
        return ". No other pays on this link" if verdict.is_told else ""
    return {
        Pays.FASTER: f", {speed}",
        Pays.SLOWER: f", {speed}. None pays on this link",
        Pays.EVEN: ", as fast as dense. None pays on this link",
        Pays.UNTOLD: f". Whether that is faster than dense {UNTOLD}",
    }[verdict.pays]


def _bytes(comparison: Comparison, verdict: Verdict) -> str:
    """Bytes of the leaders beside dense's; nothing of dense itself."""
    others = [one for one in verdict.leaders if one.method != DENSE]
    told = [*_by_words(others, lambda one: _amount(comparison.fewer(one)))]
    if not told:
        return ""
    (amount, names), *rest = told
    first = f"{names} {'send' if ' and ' in names else 'sends'} {amount} bytes"
    parts = [first, *(f"{names} {amount}" for amount, names in rest)]
    return f"Compared to dense, {', '.join(parts)}."


def _amount(fewer: float) -> str:
    if times(fewer) == times(1):
        return "about as many"
    return f"{times(fewer)} x fewer" if fewer > 1 else f"{times(1 / fewer)} x more"


def _by_words(
    standings: Sequence[Standing], words_of: Callable[[Standing], str]
) -> Iterator[tuple[str, str]]:
    """Yields what is said of methods, each with the names of those that it is said of."""
    names = defaultdict[str, list[str]](list)
    for one in standings:
        names[words_of(one)].append(one.method)
    for words, some in names.items():
        yield words, _listed(some, "and")


def _links(rates: Sequence[Rates], link: ShapedLink) -> str:
    """Links on which dense is slower than each of some methods, and those on which it is faster."""
    slower_to = [one.dense_slower_to for one in rates if one.dense_slower_to is not None]
    if link.rate_bit_per_s is None or not rates or len(slower_to) < len(rates):
        return ""
    if min(slower_to) >= HIGHEST_BIT_PER_S:
        return f"Even at {_rate(HIGHEST_BIT_PER_S)} dense is slower."
    up_to = _rate(max(link.rate_bit_per_s, _two_digits(min(slower_to), 0)))
    faster_from = [one.dense_faster_from for one in rates if one.dense_faster_from is not None]
    if len(faster_from) < len(rates):
        return f"Up to {up_to} dense is slower."
    return (
        f"Up to {up_to} dense is slower, from {_rate(_two_digits(max(faster_from), 1))} on faster."
    )


def _two_digits(amount: float, more: int) -> float:
    """Returns an amount with its first two digits, or, with 1 for `more`, the next such amount."""
    unit = 10.0 ** (len(str(int(amount))) - 2)
    return unit * (amount // unit + more)


def _rate(bit_per_s: float) -> str:
    return ShapedLink(rate_bit_per_s=bit_per_s).name


def _learnt(verdict: Verdict) -> str:
    told = [*_by_words(verdict.leaders, lambda one: one.learnt)]
    if len(told) == 1:
        return f"The other sites learn {told[0][0]}."
    return " ".join(f"By {names} the other sites learn {words}." for words, names in told)


def _listed(names: Sequence[str], last: str) -> str:
    if len(names) < 2:
        return names[0]
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def how_to_tell_more(comparison: Comparison, look: Look) -> Iterator[str]:
    """Yields why something cannot be told, and the remedy."""
    if all(verdict.is_settled for verdict in verdicts(comparison)):
        return
    if look.rounds < FEWEST:
        yield _too_few(look)
        return
    if look.busy > BUSY:
        yield (
            f"For {look.busy:.0%} of their time steps waited for a processor: other programs had "
            f"it."
        )
    longer = f"--seconds {4 * max(look.allowed_s, LEAST_SECONDS):g}"
    yield f"To tell more, repeat it while the machine does nothing else, or for longer: {longer}."


def _too_few(look: Look) -> str:
    each_s = look.took_s / look.rounds
    # A round more than is needed, for the next ones may take longer.
    needed_s = max(_two_digits((FEWEST + 1) * each_s, 1), LEAST_SECONDS)
    return (
        f"There was time for {many(look.rounds, 'round')} of steps, which took "
        f"{duration(look.took_s)}. With fewer than {FEWEST} each time may be wrong by a factor of "
        f"{UNKNOWN:g}: use --seconds {needed_s:g}."
    )
