"""The protocol of rounds with neighbours, over edges both ways and directed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outergrad.core.sites import Site
from outergrad.core.types import StateDict


@dataclass(frozen=True)
class Met:
    """The neighbours that were met in exchanges.

    Attributes:
        heard: neighbours that were heard.
        away: those of these steps of the graph that were not there.
        waited_s: seconds of waiting.
    """

    heard: frozenset[Site] = frozenset()
    away: frozenset[Site] = frozenset()
    waited_s: float = 0.0

    def __add__(self, other: Met) -> Met:
        """Returns whom both exchanges met."""
        waited_s = self.waited_s + other.waited_s
        return Met(self.heard | other.heard, self.away | other.away, waited_s)


class Rounds(Protocol):
    """Exchanges of a site with its neighbours, over edges of one kind."""

    @property
    def receivers(self) -> list[Site]:
        """The neighbours that are told of this site's weights, in any step."""
        ...

    @property
    def is_open(self) -> bool:
        """True if a round has begun and not ended."""
        ...

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the last round that recorders are told, by name."""
        ...

    def begin(self, step: int, *, whole: bool = False) -> None:
        """Sends the letters of a round.

        Args:
            step: of the graph.
            whole: whether all weights travel, whatever the method is.
        """
        ...

    def end(self) -> Met:
        """Reads the letters of the round, and moves the weights."""
        ...

    def settle(self) -> list[Site]:
        """Ends all rounds under way; called on all sites.

        Returns:
            Neighbours that have not settled in time.
        """
        ...

    def summands(self) -> list[Tensor]:
        """Returns tensors of its own that all sites add up for their mean."""
        ...

    def take_mean(self, sums: Sequence[Tensor]) -> None:
        """Makes the weights the mean.

        Args:
            sums: of what all sites' `summands` returned.
        """
        ...

    def why_away(self, site: int) -> str:
        """Returns why a neighbour is away."""
        ...

    def state(self) -> StateDict:
        """Returns what is to be saved, with copies of tensors."""
        ...

    def load(self, state: StateDict, unsettled: Sequence[int]) -> None:
        """Goes on from a saved state; called on all sites.

        Args:
            state: what `state()` returned.
            unsettled: neighbours that had not settled by then.
        """
        ...

    def close(self) -> None:
        """Says goodbye to the neighbours."""
        ...
