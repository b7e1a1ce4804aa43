"""Findings: what an attack claims, judged beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outergrad.tools.audit.figures import CLOSE, nearest, rows_back

SHOWN = 8
"""Rows that are shown beside the truth."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one attack, beside the truth.

    Attributes:
        attack: Attack in words.
        layer: Layer or parameter that gave it away.
        found: Number of things that came back, or AUC; rows to 5% of their norm.
        exact: Number of rows that came back to 1e-4 of their norm.
        of: Number of things there were to find; 0 for an AUC.
        guessed: Number of them that a guess finds without the messages.
        false: Number of things that were claimed, and are not true; canaries that were taken for
            members.
        deviation: Standard deviation of an AUC by chance.
        canaries: Number of things planted that must not be found, if some were.
        figure: The figure in words.
        by_quality: Whether the figure is how near inputs came, which says more than a number of
            them.
        pairs: Truth and what came back, of the best ones, for a page.
    """

    attack: str
    layer: str
    found: float
    of: int
    exact: int = 0
    guessed: float = 0.0
    false: int = 0
    deviation: float = 0.0
    canaries: int = 0
    figure: str
    by_quality: bool = False
    pairs: Sequence[tuple[Tensor, Tensor]] = field(default=(), repr=False, compare=False)

    @property
    def share(self) -> float:
        """Share of what there was to find beyond a guess, 0 to 1; 0 for an AUC near chance."""
        if not self.of:
            return max(0.0, 2 * (self.found - 2 * self.deviation) - 1)
        hidden = self.of - self.guessed
        return max(0.0, (self.found - self.guessed) / hidden) if hidden > 0 else 0.0

    @property
    def texts(self) -> list[Tensor]:
        """Texts that came back whole, as ids, (tokens,) each."""
        ids = [(true, back) for true, back in self.pairs if not true.is_floating_point()]
        return [back for true, back in ids if torch.equal(true, back)]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The batch behind a view, and what an attack is tested by.

    Attributes:
        x: Inputs, or ids, with the rows first.
        y: Labels.
        outside: Rows that were not in the batch, with their labels: canaries.
        vocabulary: Number of tokens, if inputs are ids.
    """

    x: Tensor
    y: Tensor
    outside: tuple[Tensor, Tensor]
    vocabulary: int | None = None


def of_rows(attack: str, layer: str, found: Tensor, truth: Truth) -> Finding:
    """Returns how many rows came back.

    Args:
        attack: Attack in words.
        layer: Layer that gave them away.
        found: Claimed rows, (found, numbers of a row).
        truth: The batch.
    """
    true = truth.x.flatten(1)
    back, false = rows_back(found, true, CLOSE)
    exact, _ = rows_back(found, true)
    pairs: list[tuple[Tensor, Tensor]] = []
    if len(found):
        nearest_NI, errors_N = nearest(found, true)
        best = errors_N.argsort()[:SHOWN].tolist()
        pairs = [(truth.x[n], nearest_NI[n].view(truth.x.shape[1:])) for n in best]
    return Finding(
        attack=attack,
        layer=layer,
        found=back,
        exact=exact,
        of=len(true),
        false=false,
        canaries=len(truth.outside[0]),
        figure=f"{back} of {len(true)} rows" + f", {exact} exactly" * (exact < back),
        pairs=pairs,
    )


def of_members(attack: str, layer: str, members: Tensor, canaries: Tensor) -> Finding:
    """Returns how many given rows were named as members.

    Args:
        attack: Attack in words.
        layer: Layer that gave them away.
        members: Which of the batch were named, bool, (rows,).
        canaries: Which of those outside were named.
    """
    return Finding(
        attack=attack,
        layer=layer,
        found=int(members.sum()),
        of=len(members),
        false=int(canaries.sum()),
        canaries=len(canaries),
        figure=f"{int(members.sum())} of {len(members)} members",
    )
