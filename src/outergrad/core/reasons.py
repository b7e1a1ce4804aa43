"""Why a unit travels as it does: the same on every site, in words only in the coverage table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from outergrad.core.types import Link, Route


class Why(Enum):
    """What decided; all but the first five mean dense."""

    FACTORS = "factors"
    LOW_RANK = "low rank"
    SPARSE = "sparse"
    CODED = "compressed"
    """Neither: a payload of another kind, as a bit per entry."""
    REPLAYED = "replayed"
    NOT_TAPPED = "not tapped"
    """Its gradient was accumulated, or not tapped in the last step."""
    USED_OUTSIDE_LAYER = "used outside layer"
    OVERLAPPING = "overlapping"
    """Several products add to the same rows of its weight."""
    ROWS = "rows"
    """Its factors would be too many rows."""
    NOT_CAPTURED = "not captured"
    """As NOT_TAPPED, of a block; so are the following."""
    USED_OUTSIDE_BLOCK = "used outside block"
    UNSENDABLE = "unsendable"
    """What it reads must not be sent."""
    DENSE = "dense method"
    """Its method is."""
    OWING = "owing"
    """What the method before had not sent has to arrive."""
    BYTES = "bytes"
    """What would be sent of it is too much."""


COMPRESSED = (Why.LOW_RANK, Why.SPARSE, Why.CODED)
"""What is sent is about the gradient, and something of it is left out."""


@dataclass(frozen=True, kw_only=True)
class AutoWay:
    """How `reduce="auto"` has low rank travel, for good.

    Attributes:
        way: that was chosen.
        seconds: that the messages of a step take so.
        others: the other ways, with their seconds.
        link: between the sites; None where the way is that of a saved state.
    """

    way: Route
    seconds: float = 0.0
    others: tuple[tuple[Route, float], ...] = ()
    link: Link | None = None

    def plain(self) -> list[Any]:
        """As JSON holds it."""
        link = None if self.link is None else [self.link.delay_s, self.link.bytes_per_s]
        return [self.way.value, self.seconds, [[w.value, s] for w, s in self.others], link]

    @staticmethod
    def of(plain: Any) -> AutoWay:
        """The inverse of `plain`; errors as of `Reason.of`."""
        way, seconds, others, link = plain
        return AutoWay(
            way=Route(way),
            seconds=float(seconds),
            others=tuple((Route(other), float(s)) for other, s in others),
            link=None if link is None else Link(*map(float, link)),
        )


@dataclass(frozen=True, kw_only=True)
class Reason:
    """How a unit travels in a step, and why.

    Attributes:
        why: what decided.
        route: of what is compressed.
        tapped: whether it is found from factors, and not from the formed gradient.
        nbytes: what would be sent of a block.
        auto: why low rank takes its way, where that was chosen.
    """

    why: Why
    route: Route = Route.DENSE
    tapped: bool = False
    nbytes: int = 0
    auto: AutoWay | None = None

    def plain(self) -> list[Any]:
        """As JSON holds it."""
        auto = None if self.auto is None else self.auto.plain()
        return [self.why.value, self.route.value, self.tapped, self.nbytes, auto]

    @staticmethod
    def of(plain: Any) -> Reason:
        """The inverse of `plain`.

        Raises:
            ValueError: it is none.
        """
        try:
            why, route, tapped, nbytes, auto = plain
            auto = None if auto is None else AutoWay.of(auto)
            facts = {"tapped": tapped, "nbytes": nbytes, "auto": auto}
            found = Reason(why=Why(why), route=Route(route), **facts)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"no reason: {error}") from error
        fits = (type(tapped), type(nbytes)) == (bool, int)
        if not fits or (found.why in COMPRESSED and found.route == Route.DENSE):
            raise ValueError(f"no reason: {found}")
        return found
