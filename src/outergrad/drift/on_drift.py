"""`og.OnDrift`: how often sites exchange, by what their data do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outergrad.drift.detectors import Detector
from outergrad.drift.kolmogorov_smirnov import KolmogorovSmirnov

KINDS = ("losses", "observed")


@dataclass(frozen=True)
class OnDrift:
    """Sites exchange when the data of one of them have drifted, in place of every k-th step.

    Choose it where data are alike for a long time and then change, and the link is dear: as
    `og.LocalSteps(og.OnDrift())`, where sites train by themselves in between. As `every=` of a
    method of gradients, as in `og.Dense(every=og.OnDrift())`, nothing is learnt between two
    exchanges: gradients add up, and their mean travels once there is drift.

    Each site's detector listens to a stream of numbers: the losses of its backward passes, or what
    the loop passes to `session.observe(values)`, such as confidences or a statistic of a layer. At
    each check every site tells the others one byte, whether its detector sees drift. If one does,
    all exchange, and all detectors begin anew. Any drift that leaves these numbers alone is not
    seen. The idea is FLARE's (arXiv 2305.08504), where a device sends its data only on drift.

    What a site tells at a check is of its data: the others learn when these change.

    Attributes:
        detector: A detector of `og.drift`, or one of your own (`og.drift.Detector`).
        of: "losses": the losses of backward passes, one value for each; "observed": what
            `session.observe` was given, at least a value for every check.
        check: Steps from one check to the next, for methods of gradients backward passes. Each
            check costs a delay of the link and a byte to each other site.
        most: Steps after which sites exchange at the latest, a multiple of `check`; None: there may
            be no exchange for ever.
    """

    detector: Detector = field(default=KolmogorovSmirnov())
    of: Literal["losses", "observed"] = field(default="losses", kw_only=True)
    check: int = field(default=1, kw_only=True)
    most: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: names the setting and its valid values.
            TypeError: the detector is none.
        """
        if isinstance(self.detector, type) or not callable(getattr(self.detector, "start", None)):
            raise TypeError(
                f"OnDrift: detector={self.detector!r}; use og.drift.KolmogorovSmirnov(...), "
                f"og.drift.PageHinkley(...) or og.drift.ADWIN(...)"
            )
        if type(self.detector).__repr__ is object.__repr__:
            raise TypeError(
                f"OnDrift: detector={type(self.detector).__name__}: the sites compare its repr, "
                f"which is that of every object; make it a frozen dataclass"
            )
        if type(self.detector).__hash__ is None:
            raise TypeError(
                f"OnDrift: detector={self.detector!r} has no hash, by which settings of layers are "
                f"told apart; make it a frozen dataclass"
            )
        _require(self.of in KINDS, "of", self.of, "'losses' or 'observed'")
        whole = type(self.check) is int and self.check >= 1
        _require(whole, "check", self.check, "a whole number, 1 or more")
        if self.most is not None:
            fits = type(self.most) is int and self.most >= 1 and self.most % self.check == 0
            remedy = f"a whole number, 1 or more, that check={self.check} divides"
            _require(fits, "most", self.most, remedy)

    @property
    def often(self) -> str:
        """Says in words when sites exchange."""
        at_least = "" if self.most is None else f", at least every {self.most} steps"
        return f"on drift{at_least}"


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"OnDrift: {name}={value!r}; use {wanted}")
