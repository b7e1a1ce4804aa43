"""The Kolmogorov-Smirnov test of a stream: the newest values against those of a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Worse = Literal["either", "higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class KolmogorovSmirnov:
    """Drift is where the newest values have another distribution than those of a reference.

    The newest m values, the window, have the distribution G; the n values before them, the
    reference, have F. Drift is where sup |F - G| is above c sqrt((n + m) / (n m)), with
    c = sqrt(-ln(alpha / 2) / 2): Smirnov's limit for large n and m. With a direction it is
    sup (F - G) or sup (G - F), and c = sqrt(-ln(alpha) / 2).

    Choose it where it should be seen whether the whole distribution changes, without an assumption
    of its form: values that are clearly apart need few of them. It is blind until reference and
    window are full, so count how many values come per step.

    The limit is that of one test of independent values. Windows overlap, and there is a test at
    every check: for one false alarm in T checks choose alpha well below 1 / T.

    Attributes:
        reference: n, 2 or more.
        window: m, 2 or more.
        alpha: Probability of a false alarm of one test, above 0 and below 1.
        worse: "either": any change is drift; "higher": only values that have become larger, as
            losses that get worse; "lower": only smaller ones, as confidences.
        keeps: True to keep the first n values after an exchange as the reference, as FLARE does
            (arXiv 2305.08504): choose it where the weights rest, so that slow drift is seen, too.
            While a model learns, its own progress is taken for drift, or hides one.
    """

    reference: int = 100
    window: int = 20
    alpha: float = 1e-4
    worse: Worse = "either"
    keeps: bool = False

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: names the setting and its valid values.
        """
        for name in ("reference", "window"):
            value = getattr(self, name)
            _require(type(value) is int and value >= 2, name, value, "a whole number, 2 or more")
        is_share = type(self.alpha) is float and 0 < self.alpha < 1
        _require(is_share, "alpha", self.alpha, "a float above 0 and below 1")
        known = ("either", "higher", "lower")
        _require(self.worse in known, "worse", self.worse, "'either', 'higher' or 'lower'")
        _require(type(self.keeps) is bool, "keeps", self.keeps, "True or False")

    @property
    def limit(self) -> float:
        """Distance of two distributions above which they count as different."""
        n, m = self.reference, self.window
        tail = self.alpha / 2 if self.worse == "either" else self.alpha
        return math.sqrt(-math.log(tail) / 2) * math.sqrt((n + m) / (n * m))

    def start(self) -> ComparedWindows:
        """Returns a new run that knows no values yet."""
        return ComparedWindows(self)


class ComparedWindows:
    """A reference and a window of a stream, compared at each check.

    Args:
        settings: of the test.
    """

    def __init__(self, settings: KolmogorovSmirnov) -> None:
        self._settings = settings
        self._values = torch.empty(0, dtype=torch.float64)
        """Reference and, behind it, window, as far as there are values."""

    def has_drifted(self, values: Tensor) -> bool:
        """Takes the next values; True if the window has another distribution than the reference."""
        n, m = self._settings.reference, self._settings.window
        found = torch.cat([self._values, values])
        if self._settings.keeps:
            self._values = torch.cat([found[:n], found[n:][-m:]])
        else:
            self._values = found[-(n + m) :]
        if len(self._values) < n + m:
            return False
        distance = distribution_distance(self._values[:n], self._values[n:], self._settings.worse)
        return distance > self._settings.limit

    def state(self) -> dict[str, Any]:
        """Returns a copy of the values."""
        return {"values": self._values.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a saved `state()`."""
        self._values = state["values"].clone()


def distribution_distance(x: Tensor, y: Tensor, worse: Worse = "either") -> float:
    """Returns the largest distance between the distribution functions of two samples.

    Args:
        x: (n,).
        y: (m,).
        worse: "higher" counts only places where y is above x in value, so that its distribution
            function is below; "lower" the others; "either" both.
    """
    places = torch.cat([x, y])
    of_x, of_y = (
        torch.searchsorted(t.sort().values, places, right=True).double() / len(t) for t in (x, y)
    )
    above, below = float((of_x - of_y).max()), float((of_y - of_x).max())
    return {"higher": above, "lower": below, "either": max(above, below)}[worse]


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"KolmogorovSmirnov: {name}={value!r}; use {wanted}")
