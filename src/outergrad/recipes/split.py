"""How the rows of one data set are dealt out to the sites, and into batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from outergrad.recipes.errors import RecipeError

Rows = list[Tensor]


def class_split(labels: Tensor, sites: int, _seed: int) -> Rows:
    """Gives each site its own classes, neighbouring ones, all their rows.

    Raises:
        RecipeError: There are more sites than classes, or several labels per row.
    """
    if labels.dim() > 1:
        raise RecipeError("--split class needs rows of one class each, not texts: use --split even")
    classes = int(labels.max()) + 1
    if sites > classes:
        raise RecipeError(f"--split class: {classes} classes are too few for {sites} sites")
    owner = labels * sites // classes
    return [torch.nonzero(owner == site).flatten() for site in range(sites)]


def even_split(labels: Tensor, sites: int, seed: int) -> Rows:
    """Shuffles the rows and gives each site every ``sites``-th of them."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return [order[site::sites] for site in range(sites)]


SPLITS: dict[str, Callable[[Tensor, int, int], Rows]] = {
    "class": class_split,
    "even": even_split,
}


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of one or more sites, the same wherever they are drawn.

    With several sites, a batch is the union of theirs: what one model would
    see, if the data were pooled.

    Attributes:
        x: The inputs of all rows, (rows, ...).
        y: Their labels, (rows,) or (rows, positions).
        rows_by_site: The rows of every site.
        sites: The sites whose rows are wanted.
        batch_size: Rows per site.
        steps: Batches per epoch.
        seed: Of the order.
    """

    x: Tensor
    y: Tensor
    rows_by_site: Rows
    sites: Sequence[int]
    batch_size: int
    steps: int
    seed: int

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of an epoch; each row comes at most once."""
        rows = torch.cat([self._order(site, number) for site in self.sites], dim=1)
        for batch in rows:
            yield self.x[batch], self.y[batch]

    def forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields batches without end, epoch after epoch."""
        for number in count():
            yield from self.epoch(number)

    def _order(self, site: int, epoch: int) -> Tensor:
        """Row numbers of one site, (steps, batch_size)."""
        rows = self.rows_by_site[site]
        seed = np.random.SeedSequence((self.seed, epoch, site)).generate_state(1)
        generator = torch.Generator().manual_seed(int(seed[0]))
        order = rows[torch.randperm(len(rows), generator=generator)]
        return order[: self.steps * self.batch_size].view(self.steps, self.batch_size)


def full_batches(rows_by_site: Rows, batch_size: int) -> int:
    """Batches that every site can fill in an epoch.

    Raises:
        RecipeError: A site cannot fill even one.
    """
    fewest = min(range(len(rows_by_site)), key=lambda site: len(rows_by_site[site]))
    rows = len(rows_by_site[fewest])
    if rows < batch_size:
        raise RecipeError(
            f"site {fewest} has {rows} rows, too few for --batch-size {batch_size}: lower it"
        )
    return rows // batch_size
