"""Reasons for a unit's route: the same on every site, put into words only in the coverage table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from outergrad.core.types import Link, Route


class Why(Enum):
    """The decisive reason; all but the first five mean dense."""

    FACTORS = "factors"
    LOW_RANK = "low rank"
    SPARSE = "sparse"
    CODED = "compressed"
    """Neither factors nor entries: a payload of another kind, such as one bit per entry."""
    REPLAYED = "replayed"
    NOT_TAPPED = "not tapped"
    """The unit's gradient was accumulated, or was not tapped in the last step."""
    USED_OUTSIDE_LAYER = "used outside layer"
    OVERLAPPING = "overlapping"
    """Several products add to the same rows of the weight."""
    ROWS = "rows"
    """The factors would have too many rows."""
    NOT_CAPTURED = "not captured"
    """Like NOT_TAPPED, for a block; the next two are for blocks, too."""
    USED_OUTSIDE_BLOCK = "used outside block"
    UNSENDABLE = "unsendable"
    """The block's inputs must not be sent."""
    DENSE = "dense method"
    """The unit's method sends dense gradients."""
    OWING = "owing"
    """A residual of the previous method still has to be sent."""
    WHOLE = "whole"
    """A site has asked for all that is owed."""
    BYTES = "bytes"
    """The block's payload would be too large."""


COMPRESSED = (Why.LOW_RANK, Why.SPARSE, Why.CODED)
"""Reasons of units that travel compressed, with some part of the gradient left out."""


@dataclass(frozen=True, kw_only=True)
class AutoWay:
    """The route that `reduce="auto"` has chosen for low-rank gradients.

    Attributes:
        way: the chosen route.
        seconds: estimated time for a step's messages on it.
        others: the other routes, with their estimated seconds.
        link: between the sites; None where the route comes from a saved state.
    """

    way: Route
    seconds: float = 0.0
    others: tuple[tuple[Route, float], ...] = ()
    link: Link | None = None

    def plain(self) -> list[Any]:
        """Returns the fields as values that JSON can hold."""
        link = None if self.link is None else [self.link.delay_s, self.link.bytes_per_s]
        return [self.way.value, self.seconds, [[w.value, s] for w, s in self.others], link]

    @staticmethod
    def of(plain: Any) -> AutoWay:
        """The inverse of `plain`; raises the same errors as `Reason.of`."""
        way, seconds, others, link = plain
        return AutoWay(
            way=Route(way),
            seconds=float(seconds),
            others=tuple((Route(other), float(s)) for other, s in others),
            link=None if link is None else Link(*map(float, link)),
        )


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A unit's route in a step, and the reason for it.

    Attributes:
        why: the decisive reason.
        route: of a compressed unit.
        tapped: whether the payload is computed from factors, not from the formed gradient.
        nbytes: bytes that would be sent of a block.
        auto: the reason for the low-rank route, where it was chosen automatically.
    """

    why: Why
    route: Route = Route.DENSE
    tapped: bool = False
    nbytes: int = 0
    auto: AutoWay | None = None

    def plain(self) -> list[Any]:
        """Returns the fields as values that JSON can hold."""
        auto = None if self.auto is None else self.auto.plain()
        return [self.why.value, self.route.value, self.tapped, self.nbytes, auto]

    @staticmethod
    def of(plain: Any) -> Reason:
        """The inverse of `plain`.

        Raises:
            ValueError: the value is no valid reason.
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
