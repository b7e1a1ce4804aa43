"""Division of the rows of a data set among sites, and into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import mean

import numpy as np
import torch
from torch import Tensor

from outergrad.launch.errors import RecipeError
from outergrad.private import PoissonSampler
from outergrad_lab.data import Dataset

ROUNDS = 200
"""Rounds of fitting; a table whose entries differ by a factor of three needs some twenty."""


def whole_shares(weights: Tensor, total: int) -> Tensor:
    """Splits a total exactly, in proportion to weights within 1, into int64 shares."""
    ends = (weights.double().cumsum(0) / weights.double().sum() * total).round().long()
    return ends.diff(prepend=ends.new_zeros(1))


def fitted_counts(weights: Tensor, row_sums: Tensor, column_sums: Tensor) -> Tensor:
    """Returns the table of whole numbers with given sums, nearest in shape to positive weights.

    Source: Deming and Stephan, 1940 (iterative proportional fitting).

    Args:
        weights: Shape of the table, (rows, columns).
        row_sums: Wanted sums, int64, (rows,).
        column_sums: Wanted sums, int64, (columns,), of the same total.
    """
    table, smallest = weights.double(), torch.finfo(torch.float64).tiny
    for _ in range(ROUNDS):
        table = table * (row_sums / table.sum(dim=1).clamp_min(smallest))[:, None]
        table = table * (column_sums / table.sum(dim=0).clamp_min(smallest))
    return _rounded(table, row_sums, column_sums)


def _rounded(table: Tensor, row_sums: Tensor, column_sums: Tensor) -> Tensor:
    """Rounds down, and adds what is missing where a row and a column both lack some."""
    counts = table.floor().long()
    rows = torch.arange(len(row_sums)).repeat_interleave(row_sums - counts.sum(dim=1))
    columns = torch.arange(len(column_sums)).repeat_interleave(column_sums - counts.sum(dim=0))
    return counts.index_put((rows, columns), torch.ones_like(rows), accumulate=True)


Rows = list[Tensor]


def class_split(data: Dataset, sites: int, _seed: int) -> Rows:
    """Gives each site neighbouring classes of its own, with all their rows.

    Raises:
        RecipeError: There are more sites than classes, or several labels per row.
    """
    labels = _one_class_each(data, "class")
    classes = int(labels.max()) + 1
    if sites > classes:
        raise RecipeError(f"--split class: {classes} classes are too few for {sites} sites")
    return _rows_of(labels * sites // classes, sites)


def even_split(data: Dataset, sites: int, seed: int) -> Rows:
    """Shuffles the rows and gives each site every ``sites``-th of them."""
    order = torch.randperm(len(data.y_train), generator=torch.Generator().manual_seed(seed))
    return [order[site::sites] for site in range(sites)]


def speaker_split(data: Dataset, sites: int, _seed: int) -> Rows:
    """Gives each site neighbouring speakers of its own, with all their rows.

    Raises:
        RecipeError: There are more sites than speakers, or the speakers are not known.
    """
    if data.groups_train is None:
        raise RecipeError("--split speaker needs --data spoken-digits: use --split even")
    speakers, place = data.groups_train.unique(return_inverse=True)
    if sites > len(speakers):
        raise RecipeError(f"--split speaker: {len(speakers)} are too few for {sites} sites")
    return _rows_of(place * sites // len(speakers), sites)


def unequal_split(data: Dataset, sites: int, seed: int) -> Rows:
    """Gives each site half as many rows as the one before it, and another mix of classes.

    Each site has about three times as much of every other class as of those between.

    Raises:
        RecipeError: There are several labels per row.
    """
    labels = _one_class_each(data, "unequal")
    rows_of_class = labels.bincount()
    rows_of_site = whole_shares(0.5 ** torch.arange(sites), len(labels))
    odd = (torch.arange(sites)[:, None] + torch.arange(len(rows_of_class))) % 2
    counts = fitted_counts(3 - 2 * odd, rows_of_site, rows_of_class)
    # Rows in order of their class, shuffled within it; owners in the same order.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]
    owner = torch.arange(sites).repeat(len(rows_of_class)).repeat_interleave(counts.T.flatten())
    return [order[owner == site] for site in range(sites)]


def _one_class_each(data: Dataset, split: str) -> Tensor:
    if data.y_train.dim() > 1:
        raise RecipeError(
            f"--split {split} needs rows of one class each, not texts: use --split even"
        )
    return data.y_train


def _rows_of(owner: Tensor, sites: int) -> Rows:
    return [torch.nonzero(owner == site).flatten() for site in range(sites)]


SPLITS: dict[str, Callable[[Dataset, int, int], Rows]] = {
    "class": class_split,
    "even": even_split,
    "speaker": speaker_split,
    "unequal": unequal_split,
}
PROPORTIONAL = {"unequal"}
"""Splits with which a site's batch is in proportion to its rows."""


def generator_of(*numbers: int) -> torch.Generator:
    """Returns a generator of its own for these numbers; PyTorch's keeps 32 bits of a seed alone."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Batches of one or more sites, the same wherever they are drawn.

    With several sites, a batch is the union of their batches, as one model would see if the data
    were pooled.

    Attributes:
        x: The inputs of all rows, (rows, ...).
        y: Their labels, (rows,) or (rows, positions).
        rows_by_site: The rows of every site.
        sites: The sites whose rows are wanted.
        batch_sizes: Rows per step of every site.
        steps: Batches per epoch.
        seed: Seed of the order.
        present: The sites whose batches make a step, if not all.
    """

    x: Tensor
    y: Tensor
    rows_by_site: Rows
    sites: Sequence[int]
    batch_sizes: Sequence[int]
    steps: int
    seed: int
    present: Sequence[int] | None = None

    @property
    def weight(self) -> float:
        """Weight of a loss, so that the mean over sites is that of the union of their batches."""
        present = range(len(self.batch_sizes)) if self.present is None else self.present
        wanted, all_of_them = (
            [self.batch_sizes[site] for site in sites] for sites in (self.sites, present)
        )
        return mean(wanted) / mean(all_of_them)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of an epoch, from `start` on; each row comes at most once."""
        rows = torch.cat([self._order(site, number) for site in self.sites], dim=1)
        for batch in rows[start:]:
            yield self.x[batch], self.y[batch]

    def forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields batches without end, epoch after epoch."""
        for number in count():
            yield from self.epoch(number)

    def _order(self, site: int, epoch: int) -> Tensor:
        """Returns the row numbers of one site, (steps, batch_sizes[site])."""
        rows, size = self.rows_by_site[site], self.batch_sizes[site]
        order = rows[torch.randperm(len(rows), generator=generator_of(self.seed, epoch, site))]
        return order[: self.steps * size].view(self.steps, size)


@dataclass(frozen=True, kw_only=True)
class PoissonBatches(Batches):
    """Batches with each row in them with the same probability, independently; some are empty.

    `batch_sizes` are expected ones, and none are needed. A batch of several sites is the union of
    those that each of them draws.

    Attributes:
        rate: The probability.
    """

    rate: float

    @property
    def weight(self) -> float:
        """1: a private sum is divided by a number that does not depend on the rows drawn."""
        return 1.0

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of an epoch, from `start` on."""
        for drawn in zip(*(self._drawn(site, number, start) for site in self.sites), strict=True):
            rows = torch.cat(drawn)
            yield self.x[rows], self.y[rows]

    def _drawn(self, site: int, epoch: int, start: int) -> Iterator[Tensor]:
        rows = self.rows_by_site[site]
        sampler = PoissonSampler(len(rows), self.rate, site=site, steps=self.steps, seed=self.seed)
        sampler.go_to(epoch * self.steps + start)
        for numbers in sampler:
            yield rows[torch.tensor(numbers, dtype=torch.int64)]


def batch_sizes(split: str, rows_by_site: Rows, batch_size: int) -> list[int]:
    """Returns the rows per step of every site: equally many, or in proportion to its rows.

    Args:
        split: A key of `SPLITS`, which decides that.
        rows_by_site: The rows of every site.
        batch_size: Rows per site and step, on average.

    Raises:
        RecipeError: A site would have no rows.
    """
    if split not in PROPORTIONAL:
        return [batch_size] * len(rows_by_site)
    rows = torch.tensor([len(rows) for rows in rows_by_site])
    sizes: list[int] = whole_shares(rows, batch_size * len(rows)).tolist()
    if 0 in sizes:
        raise RecipeError(
            f"--batch-size {batch_size} leaves site {sizes.index(0)} of --split {split} "
            "nothing: raise it, or use fewer sites"
        )
    return sizes


def full_batches(rows_by_site: Rows, sizes: Sequence[int]) -> int:
    """Returns the number of batches that every site can fill in an epoch.

    Args:
        rows_by_site: The rows of every site.
        sizes: Rows per step of every site.

    Raises:
        RecipeError: A site cannot fill even one.
    """
    steps = [len(rows) // size for rows, size in zip(rows_by_site, sizes, strict=True)]
    if 0 in steps:
        fewest = min(range(len(steps)), key=lambda site: len(rows_by_site[site]) / sizes[site])
        rows = len(rows_by_site[fewest])
        raise RecipeError(
            f"site {fewest} has {rows} rows, too few for --batch-size {sizes[fewest]}: lower it"
        )
    return min(steps)
