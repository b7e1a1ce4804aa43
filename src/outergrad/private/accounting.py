r"""The ε of Gaussian releases, by dp-accounting.

A release is the sum of clipped gradients of a batch, each of norm C at most, plus noise of standard
deviation z·C. Two data sets are neighbours if they differ in one row of one site:

- "add_or_remove": one has a row that the other lacks. With `Poisson` batches their sums differ by C
  at most: N(0, z²) against (1 − q) N(0, z²) + q N(1, z²), in units of C.
- "replace": one has another row in the place of a row. Their sums differ by 2C at most:
  (1 − q) N(0, z²) + q N(−1, z²) against (1 − q) N(0, z²) + q N(1, z²).

With `Fixed` batches it is 2C for both: of N and N + 1 rows, b each, a batch with the new row can be
made one without it by another row in its place, and a uniform draw of it stays uniform. As mixtures
over equal draws are no easier to tell apart than the worst of their parts, a release costs no more
than the Gaussian mechanism with z/2: this bound is not amplified, and holds for any batches that
pair up so, in turn as well.

| batches | neighbours | by PLD | by RDP |
|---|---|---|---|
| Poisson | add_or_remove | amplified | amplified (Mironov et al., arXiv 1908.10530) |
| Poisson | replace | amplified | refused: no bound |
| Poisson of parts in turn | add_or_remove | amplified | amplified |
| Poisson of parts in turn | replace | refused | refused: no bound |
| fixed, drawn anew | add_or_remove | not amplified | not amplified |
| fixed, drawn anew | replace | not amplified | amplified (Wang et al., arXiv 1808.00087, Th. 27) |
| fixed, in turn | either | not amplified | not amplified |

Where parts take turns, a row has its turn once in as many steps, so that n steps of P parts are
⌈n / P⌉ releases with the rate within a part, of noise in P bands at most, too (Choquette-Choo et
al., arXiv 2306.08153, theorem 4).

dp-accounting's two accountants understand a `GaussianDpEvent(z)` differently if rows are replaced:
its PLD doubles what a row changes, its RDP takes z as it is. So RDP is given z/2 here. Before
version 0.6 its PLD did not double either, so these are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from math import inf
from typing import Any, Literal

from outergrad.core.packages import how_to_install, require
from outergrad.private.sampling import CyclicPoisson, Poisson, Sampling

Accountant = Literal["pld", "rdp"]
"""Privacy loss distributions (arXiv 2106.08567), tighter; or Rényi divergences (1702.07476)."""
Adjacency = Literal["add_or_remove", "replace"]
"""Data sets that an observer should not be able to tell apart."""

Spent = Mapping[tuple[float, Sampling], int]
"""How often a row may have had its turn, by noise z and the rule of batches."""

ADJACENCIES: dict[Adjacency, str] = {
    "add_or_remove": "one row more or less",
    "replace": "one row in place of another",
}
"""Adjacencies in words."""
LARGEST = 100.0
"""Bound by RDP above which no privacy loss distribution is computed: it would take gigabytes."""


def check_terms(accountant: str, adjacency: str) -> None:
    """Checks by what and between which neighbours ε is to be told.

    Raises:
        ValueError: there is no such accountant or adjacency.
    """
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant must be 'pld' or 'rdp', not {accountant!r}")
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}, not {adjacency!r}")


def check_delta(delta: float) -> None:
    """Checks a probability δ.

    Raises:
        ValueError: it is not between 0 and 1.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, not {delta!r}")


def epsilon(
    spent: Spent,
    delta: float,
    *,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_or_remove",
) -> float:
    """Returns an upper bound of ε, of all releases together.

    Args:
        spent: counts by noise z, over the clip, and batches.
        delta: δ.
        accountant: what computes it; PLD's bound is infinite where RDP's is above `LARGEST`.
        adjacency: which data sets are neighbours.

    Raises:
        ImportError: dp-accounting is not installed.
        ValueError: it is not to be had by this accountant.
    """
    check_terms(accountant, adjacency)
    check_delta(delta)
    _check_package()
    return _epsilon(tuple(spent.items()), delta, accountant, adjacency)


def _check_package() -> None:
    require("dp_accounting")
    found = version("dp-accounting")
    if tuple(map(int, found.split(".")[:2])) < (0, 6):
        raise ImportError(
            f"dp-accounting {found} counts a replaced row once, not twice: "
            f"{how_to_install('dp_accounting')}"
        )


@lru_cache(maxsize=256)
def _epsilon(
    spent: tuple[tuple[tuple[float, Sampling], int], ...],
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
) -> float:
    if accountant == "pld" and _roughly(spent, delta, adjacency) > LARGEST:
        return inf
    found = _accountant(accountant, adjacency)
    with _without_warnings_of_orders():
        for (noise, sampling), steps in spent:
            found.compose(_event(noise, sampling, accountant, adjacency), steps)
    return float(found.get_epsilon(delta))


def _roughly(spent: tuple[Any, ...], delta: float, adjacency: Adjacency) -> float:
    """Returns a bound by RDP that may be loose, to see what PLD would have to go through."""
    if adjacency == "add_or_remove":
        return _epsilon(spent, delta, "rdp", adjacency)
    twice = tuple(((noise / 2, sampling), steps) for (noise, sampling), steps in spent)
    return _epsilon(twice, delta, "rdp", "add_or_remove")


def _accountant(accountant: Accountant, adjacency: Adjacency) -> Any:
    from dp_accounting import NeighboringRelation, pld, rdp

    relation = {
        "add_or_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace": NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    of = pld.PLDAccountant if accountant == "pld" else rdp.RdpAccountant
    return of(neighboring_relation=relation)


def _event(noise: float, sampling: Sampling, accountant: Accountant, adjacency: Adjacency) -> Any:
    import dp_accounting as dp

    replaced = adjacency == "replace"
    doubles = accountant == "pld" and replaced
    of_two_rows = dp.GaussianDpEvent(noise if doubles else noise / 2)
    if isinstance(sampling, CyclicPoisson):
        if replaced:
            raise ValueError(
                "adjacency='replace' with batches of parts in turn: no bound is known: pass "
                "adjacency='add_or_remove'"
            )
        sampling = sampling.of_part
    if isinstance(sampling, Poisson):
        if replaced and accountant == "rdp":
            raise ValueError(
                "adjacency='replace' with Poisson batches: dp-accounting has no bound by RDP: pass "
                "accountant='pld', or adjacency='add_or_remove'"
            )
        whole = dp.GaussianDpEvent(noise)
        return whole if sampling.rate == 1 else dp.PoissonSampledDpEvent(sampling.rate, whole)
    if sampling.fresh and replaced and accountant == "rdp":
        return dp.SampledWithoutReplacementDpEvent(sampling.rows, sampling.size, of_two_rows)
    return of_two_rows


@contextmanager
def _without_warnings_of_orders() -> Iterator[None]:
    """Drops what dp-accounting prints for each order that it leaves out: the bound holds still."""

    def tells_something_else(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(tells_something_else)
    try:
        yield
    finally:
        logger.removeFilter(tells_something_else)
