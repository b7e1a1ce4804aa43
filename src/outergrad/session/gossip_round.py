"""One exchange of a site with its neighbours, from its letters on until it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outergrad.core.sites import Site
from outergrad.core.types import StateDict
from outergrad.record.stats import Since


@dataclass
class Round:
    """Whom this site has asked, and what has come of it.

    With `og.Gossip(overlap=...)` it lasts while the site makes steps. What comes meanwhile is kept
    in `moves`: so it counts after the same step however quick the letters are, and a state may be
    saved in between without a change of the weights.

    Attributes:
        drawn: the neighbours of this step of the graph.
        asked: those of them that this site has sent a letter.
        since: counts the bytes from its beginning on.
        moves: how far letters move each weight when the round ends; None where they do at once.
        came: of those heard, the square of how far away their weights were.
    """

    drawn: Sequence[Site]
    asked: Sequence[Site]
    since: Since
    moves: list[Tensor] | None = None
    came: dict[Site, float] = field(default_factory=dict)

    @property
    def heard(self) -> set[Site]:
        """The sites that were asked and heard."""
        return {site for site in self.asked if site in self.came}

    @property
    def away(self) -> set[Site]:
        """The sites of this step of the graph that were not heard."""
        return set(self.drawn) - self.heard

    @property
    def distance(self) -> float | None:
        """Root mean square of how far away those heard were; None if that is not known of any."""
        squares = [self.came[site] for site in self.heard if math.isfinite(self.came[site])]
        return (sum(squares) / len(squares)) ** 0.5 if squares else None

    def state(self) -> StateDict:
        """Returns what is to be saved, with copies of tensors."""
        numbers = {"drawn": [*map(int, self.drawn)], "asked": [*map(int, self.asked)]}
        moves = None if self.moves is None else [t.clone() for t in self.moves]
        return {**numbers, "came": {int(s): x for s, x in self.came.items()}, "moves": moves}
