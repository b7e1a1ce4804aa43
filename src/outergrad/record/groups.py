"""Singular values of a layer's activations, deltas and gradient, by group of samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.capture.batch import SampledUse
from outergrad.core.transform import SampleRows
from outergrad.core.types import Factors, Slot
from outergrad.linalg.outer import coalesce
from outergrad.linalg.spectra import values_of, values_of_product

Uses = Sequence[Callable[[], Factors]]

_NO_SAMPLES = "which sample each row is of is not known"


class _UnknownError(Exception):
    """Why a layer has no values by group, in words."""


class _Values(NamedTuple):
    """Singular values of one product of a group, each (G, K), and its number of rows."""

    activations: Tensor
    deltas: Tensor
    gradient: Tensor
    rows: int


class GroupSpectra:
    """Singular values by group in one step, by weight.

    With A and D zero outside the rows of a group c, its gradient is `D_cᵀ A_c`, and the gradients
    of all groups add up to that of the site. Source: AutoSpec, arXiv 2406.11825.

    Args:
        site: name of the group of all samples, where the loop gives no labels.
        most: number of values to keep, the largest.
        labelled: whether the loop gives labels.
    """

    def __init__(self, site: str, most: int, *, labelled: bool) -> None:
        self._site, self._most, self._labelled = site, most, labelled
        self._values: defaultdict[str, dict[str, list[_Values]]] = defaultdict(dict)
        self._slots: defaultdict[str, list[Slot]] = defaultdict(list)
        self.why: dict[str, str] = {}

    def clear(self) -> None:
        """Drops all values, for a step that starts again."""
        for of in (self._values, self._slots, self.why):
            of.clear()

    def add(self, slot: Slot, uses: Uses, scale: float) -> None:
        """Adds the rows of one product, of all its uses together.

        Args:
            slot: the product.
            uses: its uses in this step.
            scale: factor by which this site's gradient is multiplied.
        """
        others = self._slots[slot.weight]
        others.append(slot)
        try:
            if any(slot.overlaps(other) for other in others[:-1]):
                raise _UnknownError("several products add up to it")
            found = dict(self._by_group(slot, uses))
        except _UnknownError as unknown:
            self.why[slot.weight] = str(unknown)
            return
        for label, rows in found.items():
            values = self._values[slot.weight].setdefault(label, [])
            values.append(_values(slot, rows, scale))

    def measured(self, name: str) -> dict[str, object]:
        """Returns the values as fields of `events.Layer`; empty where they are not known."""
        if name in self.why or name not in self._values:
            return {}
        found = self._values[name]
        fields = {"group_" + field: self._largest(found, field) for field in _Values._fields[:3]}
        rows = {label: max(one.rows for one in values) for label, values in found.items()}
        return {"group_rows": rows, **fields}

    def _largest(
        self, found: Mapping[str, Sequence[_Values]], field: str
    ) -> dict[str, tuple[float, ...]]:
        largest = {}
        for label, values in found.items():
            sigma = torch.cat([getattr(one, field).flatten() for one in values])
            largest[label] = tuple(sigma.sort(descending=True).values[: self._most].tolist())
        return largest

    def _by_group(self, slot: Slot, uses: Uses) -> Iterator[tuple[str, Factors]]:
        """Yields the rows of each group.

        Raises:
            _UnknownError: they cannot be told apart.
        """
        if not uses:
            raise _UnknownError("its rows were not captured")
        parts = [self._rows(slot, use) for use in uses]
        d_GNO = torch.cat([rows.factors.d_GRO for rows, _ in parts], dim=1)
        a = torch.cat([rows.factors.a_GRI for rows, _ in parts], dim=0 if slot.lookup else 1)
        names = sorted({label for _, labels in parts for label in labels})
        group_N = torch.cat([_group_of_rows(rows, labels, names) for rows, labels in parts])
        for place, name in enumerate(names):
            (here,) = (group_N == place).nonzero(as_tuple=True)
            if len(here):
                a_here = a[here] if slot.lookup else a[:, here]
                yield name, Factors(d_GNO[:, here], a_here)

    def _rows(self, slot: Slot, use: Callable[[], Factors]) -> tuple[SampleRows, tuple[str, ...]]:
        """Returns the rows of one use, and the labels of its samples."""
        sampled = use if isinstance(use, SampledUse) and use.is_told else None
        if sampled is not None and not sampled.has_rows:
            raise _UnknownError("gradients of its samples were formed, and its rows are gone")
        if not self._labelled and sampled is None and not slot.lookup:
            return SampleRows(use()), (self._site,)
        if sampled is None:
            raise _UnknownError(_NO_SAMPLES)
        if not self._labelled:
            return sampled.by_sample(), (self._site,) * max(sampled.samples.total, 1)
        labels, total = sampled.samples.groups, sampled.samples.total
        if labels is None:
            raise _UnknownError("the forward was given no labels by session.groups()")
        if len(labels) != total:
            raise _UnknownError(f"its layer counts {total} samples, and {len(labels)} have labels")
        return sampled.by_sample(), labels


def _group_of_rows(rows: SampleRows, labels: Sequence[str], names: Sequence[str]) -> Tensor:
    """Returns the index of each row's group among all names, (N,)."""
    d_GNO, samples_N = rows.factors.d_GRO, rows.samples_N
    if samples_N is None:
        return torch.full((d_GNO.shape[1],), names.index(labels[0]), device=d_GNO.device)
    index = {name: place for place, name in enumerate(names)}
    group_B = torch.tensor([index[label] for label in labels], device=d_GNO.device)
    return group_B[samples_N]


def _values(slot: Slot, rows: Factors, scale: float) -> _Values:
    d_GNO, a = rows.d_GRO.double() * scale, rows.a_GRI
    deltas = values_of(d_GNO)
    if not slot.lookup:
        return _Values(values_of(a), deltas, values_of_product(d_GNO, a), d_GNO.shape[1])
    ids_R, d_RO = coalesce(a, d_GNO[0])  # rows of the table are orthogonal directions
    counts_R = torch.bincount(torch.searchsorted(ids_R, a)).double()
    activations = counts_R.sqrt().sort(descending=True).values[None]
    return _Values(activations, deltas, values_of(d_RO[None]), d_GNO.shape[1])
