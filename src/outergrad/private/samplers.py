"""Samplers whose batches are drawn as the ledger takes them to be."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from outergrad.capture.units import ids_of
from outergrad.private.sampling import CyclicPoisson, Fixed, Poisson, Sampling

_Draw = Callable[[np.random.Generator, int], np.ndarray]
"""Returns the rows of a batch, by its number."""


class _DrawnBatches(Sampler[list[int]]):
    """Batches, each of which depends on a secret seed, the site and its own number alone."""

    own_to_site = True
    """Its seed is a secret of this site: checkpoints do not hand it to new sites."""

    def __init__(
        self,
        sampling: Sampling,
        rows: int,
        draw: _Draw,
        steps: int | None,
        site: int,
        seed: Any,
        units: int | None = None,
    ) -> None:
        if site < 0:
            raise ValueError(f"site must be 0 or more, not {site!r}")
        if steps is not None and steps < 1:
            raise ValueError(f"steps must be 1 or more, not {steps!r}")
        self.sampling, self.rows, self.site = sampling, rows, site
        self.units = rows if units is None else units
        self.steps = max(1, round(1 / sampling.rate)) if steps is None else steps
        self.drawn = 0
        self._draw, self._seed = draw, secrets.randbits(128) if seed is None else int(seed)
        self._left: int | None = None

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        left, self._left = self._left, None
        for _ in range(self.steps if left is None else left):
            number, self.drawn = self.drawn, self.drawn + 1
            yield self._draw(self._generator(number), number).tolist()

    def _generator(self, number: int) -> np.random.Generator:
        # torch's generator on the CPU keeps 32 bits of a seed, which can all be tried.
        return np.random.Generator(
            np.random.Philox(np.random.SeedSequence([self._seed, self.site, number]))
        )

    def go_to(self, drawn: int) -> None:
        """Goes on behind so many batches, with what is left of the epoch that they end in.

        A loader with workers asks for batches before the training does. So after a resume within
        an epoch, call this with the number of steps that were made.

        Raises:
            ValueError: the number is negative.
        """
        if drawn < 0:
            raise ValueError(f"drawn must be 0 or more, not {drawn!r}")
        self.drawn, self._left = drawn, self.steps - drawn % self.steps

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs; it holds the secret seed."""
        return {
            "sampling": str(self.sampling),
            "rows": self.rows,
            "seed": f"{self._seed:x}",
            "drawn": self.drawn,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where the state was saved, to the bit.

        Raises:
            ValueError: the state is of other rows or of batches that are drawn otherwise.
        """
        ours, theirs = (
            {name: value for name, value in state.items() if name not in ("seed", "drawn")}
            for state in (self.state_dict(), state_dict)
        )
        if theirs != ours:
            raise ValueError(f"the state is of {theirs}, this sampler of {ours}: make it alike")
        self._seed = int(state_dict["seed"], 16)
        self.go_to(state_dict["drawn"])


class PoissonSampler(_DrawnBatches):
    """Batches with each of N rows in them with probability q, independently: `Poisson(q)`.

    Choose it for every private training. Pass it as `DataLoader(dataset, batch_sampler=sampler,
    collate_fn=CollateEmpty(dataset))`: batches differ in size, q N on average, and an empty one
    has to be made of something. A model must take a batch of no rows (PyTorch's layers do, batch
    norms do not); the mean loss of it is NaN, its gradient is 0.

    All sites need the same `rate` and `steps`: then all have as many batches, whatever rows they
    have.

    With `groups`, patients (or other units) are drawn in place of rows, each with probability q,
    and come with their rows. That is what `og.Private(unit="patient")` has to be trained on:
    `batch` is q times the number of patients of all sites.

    Args:
        rows: N, rows of this site.
        rate: q.
        groups: id of the patient of each row, a whole number or a text; None to draw rows.
        unit: what is drawn, the word of `og.Private(unit=...)`; with `groups` it has to be given.
        at_most: rows of a patient in a batch, which are drawn anew each time where a patient has
            more. It is for memory and time: clipping bounds a patient anyway. None for all rows.
        site: number of this site; with one seed at all sites they still draw differently.
        steps: batches per epoch; by default 1 / q, rounded, in which each row comes up once on
            average.
        seed: of this site's draws, which no other site may know: who knows which rows were in a
            batch gets no less than `Fixed(..., fresh=False)` tells. None draws 128 bits from the
            operating system, which is what to choose outside of tests.

    Attributes:
        drawn: number of batches so far, over all epochs.
        units: number of this site's patients, or of its rows without `groups`.

    Raises:
        ValueError: an argument is not allowed.
        TypeError: an id of `groups` is neither a whole number nor a text.
    """

    def __init__(
        self,
        rows: int,
        rate: float,
        *,
        groups: Iterable[Any] | None = None,
        unit: str | None = None,
        at_most: int | None = None,
        site: int = 0,
        steps: int | None = None,
        seed: int | None = None,
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows must be 1 or more, not {rows!r}")
        if groups is None and at_most is not None:
            raise ValueError("at_most is about the rows of a group: pass groups=, or leave it out")
        if groups is not None and unit in (None, "", "sample"):  # samples are drawn one by one
            raise ValueError("groups: say of what: pass unit='patient', as to og.Private(unit=)")
        draw, units = partial(_poisson, rows, rate), rows
        if groups is not None:
            rows_of = _rows_of(ids_of(groups, "PoissonSampler"), rows)
            draw = partial(_poisson_groups, rows_of, rate, _most(at_most, rows))
            units = len(rows_of)
        super().__init__(Poisson(rate, unit or "sample"), rows, draw, steps, site, seed, units)

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs; it holds the secret seed."""
        grouped = {} if self.units == self.rows else {"units": self.units}
        return super().state_dict() | grouped


class FixedSampler(_DrawnBatches):
    """Batches of b of N rows, drawn anew for each batch, without a row twice: `Fixed(b, N)`.

    Choose it where all batches must be of one size; it needs more noise than `PoissonSampler`. Pass
    it as `DataLoader(dataset, batch_sampler=sampler)`.

    Args:
        rows: N, rows of this site.
        size: b, rows of a batch.
        site: as for `PoissonSampler`.
        steps: batches per epoch, the same at all sites; by default N / b, rounded.
        seed: as for `PoissonSampler`.

    Attributes:
        drawn: number of batches so far, over all epochs.

    Raises:
        ValueError: an argument is not allowed.
    """

    def __init__(
        self,
        rows: int,
        size: int,
        *,
        site: int = 0,
        steps: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(Fixed(size, rows), rows, partial(_fixed, rows, size), steps, site, seed)


class CyclicPoissonSampler(_DrawnBatches):
    """Batches of one part of the rows after another: `CyclicPoisson(rate, parts)`.

    Choose it for noise in bands, `og.Private(bands=parts)`: batches are of the same expected size
    as those of `PoissonSampler(rows, rate)`. Every batch must make one step, in the order in which
    batches are drawn: of a loader with workers, which draws ahead, leave no epoch early without
    `go_to`. Otherwise as for `PoissonSampler`.

    Args:
        rows: N, rows of this site; row i is in part i mod `parts`.
        rate: share of the rows in a batch, on average.
        parts: number of parts, the same at all sites.
        site: as for `PoissonSampler`.
        steps: as for `PoissonSampler`.
        seed: as for `PoissonSampler`.

    Attributes:
        drawn: number of batches so far, over all epochs.

    Raises:
        ValueError: an argument is not allowed.
    """

    def __init__(
        self,
        rows: int,
        rate: float,
        parts: int,
        *,
        site: int = 0,
        steps: int | None = None,
        seed: int | None = None,
    ) -> None:
        sampling = CyclicPoisson(rate, parts)
        if rows < parts:
            raise ValueError(f"rows must be parts={parts} or more, not {rows!r}")
        super().__init__(sampling, rows, partial(_cyclic, rows, sampling), steps, site, seed)


def _poisson(rows: int, rate: float, generator: np.random.Generator, number: int) -> np.ndarray:
    return np.flatnonzero(generator.random(rows) < rate)


def _rows_of(ids: Sequence[str], rows: int) -> list[np.ndarray]:
    """Returns the rows of each group, in the order of their first rows."""
    if len(ids) != rows:
        raise ValueError(f"groups has {len(ids):,} ids, and there are {rows:,} rows: give each one")
    found: dict[str, list[int]] = {}
    for row, one in enumerate(ids):
        found.setdefault(one, []).append(row)
    return [np.array(some) for some in found.values()]


def _most(at_most: int | None, rows: int) -> int:
    if at_most is not None and at_most < 1:
        raise ValueError(f"at_most must be 1 or more, not {at_most!r}")
    return rows if at_most is None else at_most


def _poisson_groups(
    rows_of: Sequence[np.ndarray],
    rate: float,
    most: int,
    generator: np.random.Generator,
    number: int,
) -> np.ndarray:
    drawn = [rows_of[unit] for unit in _poisson(len(rows_of), rate, generator, number)]
    few = [r if len(r) <= most else generator.choice(r, most, replace=False) for r in drawn]
    return np.concatenate(few) if few else np.zeros(0, dtype=np.int64)


def _cyclic(
    rows: int, sampling: CyclicPoisson, generator: np.random.Generator, number: int
) -> np.ndarray:
    part = np.arange(number % sampling.parts, rows, sampling.parts)
    return part[generator.random(len(part)) < sampling.of_part.rate]


def _fixed(rows: int, size: int, generator: np.random.Generator, number: int) -> np.ndarray:
    return generator.choice(rows, size, replace=False)


class CollateEmpty:
    """A `collate_fn` that also makes a batch of no rows: one of the first row, cut to length 0.

    PyTorch's own fails at it. The first row's numbers are in none of the tensors, only their shapes
    and types.

    Args:
        dataset: of the loader.
        collate_fn: for batches that have rows; it stacks them along the first dimension. PyTorch's
            default if None.

    Raises:
        TypeError: a batch has parts, other than tensors and texts, that cannot be cut; when it is
            empty.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn or default_collate

    def __call__(self, rows: list[Any]) -> Any:
        """Returns a batch of these rows."""
        return self.collate_fn(rows) if rows else _cut(self.collate_fn([self.dataset[0]]))


def _cut(batch: Any) -> Any:
    if isinstance(batch, Tensor) and batch.dim():
        return batch[:0]
    if isinstance(batch, Mapping):
        return {name: _cut(part) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        of_texts = bool(batch) and all(isinstance(part, str | bytes) for part in batch)
        parts = [] if of_texts else [_cut(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise TypeError(
        f"a batch of no rows cannot be made of {type(batch).__name__}: pass a collate_fn of your "
        f"own to the DataLoader, which takes an empty list"
    )


def sampling_of(loader: DataLoader[Any]) -> Sampling:
    """Returns how a loader draws its batches, as the ledger has to know it.

    Returns:
        `Poisson`, `CyclicPoisson` or `Fixed` of a loader with a sampler of this module;
        `Fixed(..., fresh=False)`, for which nothing is amplified, of one that goes through its rows
        in turn, shuffled or not.

    Raises:
        ValueError: it is not known what its batches tell; the message says what to change.
    """
    rows = _rows(loader)
    sampler = loader.batch_sampler
    if isinstance(sampler, _DrawnBatches):
        return _of_drawn(loader, sampler, rows)
    if type(sampler) is BatchSampler and _goes_through(sampler.sampler, rows):
        return Fixed(min(sampler.batch_size, rows), rows, fresh=False)
    what = type(getattr(sampler, "sampler", sampler)).__name__
    raise ValueError(
        f"the loader's batches come from a {what}, of which no bound of privacy is known: pass "
        f"batch_sampler=PoissonSampler(len(dataset), rate) to the DataLoader, on this site's rows "
        f"alone"
    )


def expected_size(loader: DataLoader[Any]) -> float:
    """Returns how many rows, or other units, a loader draws per batch on average.

    Raises:
        ValueError: as `sampling_of`.
    """
    sampling = sampling_of(loader)
    if isinstance(sampling, Fixed):
        return sampling.size
    sampler = loader.batch_sampler
    assert isinstance(sampler, _DrawnBatches)
    return sampling.rate * sampler.units


def _rows(loader: DataLoader[Any]) -> int:
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        raise ValueError(
            "the loader's dataset is a stream, in whose order rows come: pass a dataset with "
            "__getitem__ and __len__, and batch_sampler=PoissonSampler(len(dataset), rate)"
        )
    return len(loader.dataset)


def _of_drawn(loader: DataLoader[Any], sampler: _DrawnBatches, rows: int) -> Sampling:
    name = type(sampler).__name__
    if sampler.rows != rows:
        raise ValueError(
            f"{name} draws from {sampler.rows:,} rows, and the loader's dataset has {rows:,}: "
            f"pass {name}(len(dataset), ...)"
        )
    if not isinstance(sampler.sampling, Fixed):
        try:
            loader.collate_fn([])
        except Exception as error:
            raise ValueError(
                f"{name} draws empty batches, too, which the loader's collate_fn cannot make: pass "
                f"collate_fn=CollateEmpty(dataset) to the DataLoader"
            ) from error
    return sampler.sampling


def _goes_through(sampler: Any, rows: int) -> bool:
    """True if each row comes up exactly once in an epoch."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == rows
    return type(sampler) is SequentialSampler
