"""What travels how and in which order: the same on every site, from agreed facts alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from outergrad._bucket import Bucket
from outergrad._dense_bucket import DenseBucket
from outergrad._factor_bucket import FactorBucket
from outergrad._foresight import Foresight
from outergrad._types import Exchange, Slot, Unit
from outergrad.comm.wire import Header

_FIRST_DENSE_BYTES = 1 << 20
_DENSE_BYTES = 25 << 20
_RIDERS_BYTES = 1 << 18
_RIDERS_EXTRA_BYTES = 1 << 14


@dataclass(frozen=True)
class Model:
    """The trainable part of a model, as all sites agreed on it.

    Attributes:
        params: trainable parameters by full name, in the order of registration.
        slots: every slot, in the order of the model.
        units: the slots, grouped by shared parameters.
        reasons: for every parameter outside the units, why it travels dense.
    """

    params: Mapping[str, nn.Parameter]
    slots: tuple[Slot, ...]
    units: tuple[Unit, ...]
    reasons: Mapping[str, str]

    @staticmethod
    def of(
        params: Mapping[str, nn.Parameter], slots: Sequence[Slot], reasons: Mapping[str, str]
    ) -> Model:
        """Groups the slots into units."""
        numel = {name: p.numel() for name, p in params.items()}
        units = tuple(_unit(group, numel) for group in _connected(slots))
        return Model(params, tuple(slots), units, reasons)


def _unit(slots: Sequence[Slot], numel: Mapping[str, int]) -> Unit:
    names = tuple(dict.fromkeys(name for slot in slots for name in slot.params))
    return Unit(tuple(slots), names, sum(numel[name] for name in names))


def _connected(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Groups of slots that share parameters, directly or through each other."""
    groups: list[list[Slot]] = []
    for slot in slots:
        touching = [g for g in groups if any(set(s.params) & set(slot.params) for s in g)]
        groups = [g for g in groups if g not in touching]
        groups.append([*(s for g in touching for s in g), slot])
    return groups


@dataclass(frozen=True)
class Choice:
    """What the headers of a step decide.

    Attributes:
        factors: per unit, whether it travels as factors in this step.
        wanted: per unit, whether it should be tapped in the next forward.
        sizes: per unit, bytes of its factors on the site that has most; 0 if it goes dense.
        words: per unit, how it travels and why, for the coverage table.
    """

    factors: tuple[bool, ...]
    wanted: tuple[bool, ...]
    sizes: tuple[int, ...]
    words: tuple[str, ...] = field(compare=False)


class Planner:
    """Turns headers into buckets; every site computes the same."""

    def __init__(self, model: Model, exchange: Exchange | None, sites: int) -> None:
        self._model, self._exchange, self._sites = model, exchange, sites
        self._slot_index = {slot: k for k, slot in enumerate(model.slots)}
        self._mixed: set[Unit] = set()
        self._dense: dict[Sequence[str], DenseBucket] = {}
        self._last: tuple[Choice, list[Bucket]] | None = None
        self._order = tuple(model.params)[::-1]
        self.foresight = Foresight(self.facts)
        self.opening: frozenset[str] = frozenset()
        """Parameters of the first message of the last step: when they are ready, it is time."""

    def first_wanted(self) -> tuple[bool, ...]:
        """What to tap before any rows are known: whatever could pay with a single row."""
        exchange = self._exchange
        if exchange is None:
            return tuple(False for _ in self._model.units)
        return tuple(exchange.break_even(unit, self._sites) > 1 for unit in self._model.units)

    def mark_mixed(self, names: Sequence[str]) -> None:
        """Sends units of these parameters dense from now on: they also have a dense part."""
        self._mixed |= {u for u in self._model.units if set(u.params) & set(names)}
        self.foresight.forget()

    def facts(self, headers: Sequence[Header]) -> Hashable:
        """What the headers decide: the choice, the length of every message, who has gradients."""
        choice = self.choose(headers)
        units = (unit for unit, on in zip(self._model.units, choice.factors, strict=True) if on)
        slots = [slot for unit in units for slot in unit.slots]
        pieces = tuple(self._piece(slot, header) for slot in slots for header in headers)
        return choice, pieces, tuple((header.used, header.alone) for header in headers)

    def _piece(self, slot: Slot, header: Header) -> tuple[int, torch.dtype]:
        assert self._exchange is not None
        use = header.uses[self._slot_index[slot]]
        return self._exchange.sent_rows(slot, use.rows, header.rank), use.dtype

    def settle(self, *, applied: bool) -> None:
        """Tells the exchange that a step is over, for all sites alike."""
        if self._exchange is not None:
            self._exchange.settle(applied=applied)

    def captures(self, name: str, headers: Sequence[Header]) -> bool:
        """Whether some site announced rows for a product of the parameter."""
        slots = [k for slot, k in self._slot_index.items() if name in slot.params]
        return any(header.uses[k].rows for header in headers for k in slots)

    def choose(self, headers: Sequence[Header]) -> Choice:
        """Decides from what all sites announced."""
        factors, wanted, sizes, words = [], [], [], []
        for unit in self._model.units:
            index = [self._slot_index[slot] for slot in unit.slots]
            rows_SK = [[header.uses[k].rows for k in index] for header in headers]
            tapped = all(header.uses[k].tapped for header in headers for k in index)
            pays = self._pays(unit, rows_SK)
            wanted.append(pays)
            factors.append(pays and tapped)
            sizes.append(self._largest_size(unit, rows_SK) if factors[-1] else 0)
            words.append(self._why(unit, rows_SK, pays=pays, tapped=tapped))
        return Choice(tuple(factors), tuple(wanted), tuple(sizes), tuple(words))

    def _why(
        self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, pays: bool, tapped: bool
    ) -> str:
        """The word "factors" or why dense; "{pays}" stands for when factors would pay."""
        if pays:
            return "factors" if tapped else "accumulated, or not tapped in the last step; {pays}"
        if unit in self._mixed:
            return "the weight is also used outside its layer"
        if any(a.overlaps(b) for i, a in enumerate(unit.slots) for b in unit.slots[i + 1 :]):
            return "shared by several products; {pays}"
        return f"{max(map(sum, rows_SK))} rows; {{pays}}"

    def _pays(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        if self._exchange is None or unit in self._mixed:
            return False
        return self._exchange.pays(unit, rows_SK)

    def _largest_size(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> int:
        return max(self._size(unit, rows_K, site) for site, rows_K in enumerate(rows_SK))

    def _size(self, unit: Unit, rows_K: Sequence[int], site: int) -> int:
        exchange = self._exchange
        if exchange is None:
            return 0
        widths = (
            slot.groups * (slot.inputs * (not slot.lookup) + slot.outputs) for slot in unit.slots
        )
        rows = (exchange.sent_rows(s, n, site) for s, n in zip(unit.slots, rows_K, strict=True))
        return 4 * sum(w * n for w, n in zip(widths, rows, strict=True))

    def buckets(self, choice: Choice) -> list[Bucket]:
        """The messages of a step in the order in which every site starts them.

        Members come in the reverse order of registration, about that in which backward reaches
        them; a unit stands where its last parameter is reached.
        """
        if self._last is None or self._last[0] != choice:
            buckets = self._fill(choice)
            self._dense = {b.dense_params: b for b in buckets if isinstance(b, DenseBucket)}
            self._last, self.opening = (choice, buckets), buckets[0].params
        return self._last[1]

    def dense_bucket(self, names: Sequence[str]) -> DenseBucket:
        """The bucket of these parameters, with its buffer if the last plan had it, too."""
        members = {name: self._model.params[name] for name in names}
        return self._dense.get(tuple(names)) or DenseBucket(members)

    def _fill(self, choice: Choice) -> list[Bucket]:
        chosen = zip(self._model.units, choice.factors, choice.sizes, strict=True)
        units = {self._last_param(unit): (unit, size) for unit, on, size in chosen if on}
        inside = {name for unit, _ in units.values() for name in unit.params}
        dense = [name for name in self._order if name not in inside]
        riders = dense if self._may_ride(dense, sum(size for _, size in units.values())) else []
        shelf = _Shelf(self, self._exchange, riders)
        for name in self._order:
            if name in units:
                shelf.add_unit(*units.pop(name), last=not units)
            elif name not in inside and not riders:
                shelf.add_param(name, self._model.params[name])
        return shelf.close()

    def factor_bucket(
        self, index: int, units: Sequence[Unit], riders: Sequence[str]
    ) -> FactorBucket:
        """The message of these units, with these parameters riding along."""
        assert self._exchange is not None
        along = {name: self._model.params[name] for name in riders}
        return FactorBucket(index, units, self._exchange, along)

    def _may_ride(self, dense: Sequence[str], factor_bytes: int) -> bool:
        """Whether the dense gradients are so small that they go along with the factors.

        An all-gather sends S / 2 times what an all-reduce would: nothing more at two sites, and
        never more in sum than if the whole model travelled dense.
        """
        params, sites = self._model.params, self._sites
        nbytes = sum(params[name].nbytes for name in dense)
        extra = nbytes * (sites - 1) * (sites - 2) // sites
        total = sum(p.nbytes for p in params.values())
        fits = (nbytes + factor_bytes) * sites <= 2 * total
        small = nbytes <= _RIDERS_BYTES and extra <= _RIDERS_EXTRA_BYTES
        return bool(factor_bytes) and small and fits

    def _last_param(self, unit: Unit) -> str:
        return max(unit.params, key=self._order.index)


class _Shelf:
    """Buckets being filled: one of factors and one per dtype at a time.

    Args:
        planner: makes the buckets.
        exchange: says how large a bucket of factors becomes.
        riders: parameters that go along with the last bucket of factors.
    """

    def __init__(self, planner: Planner, exchange: Exchange | None, riders: Sequence[str]) -> None:
        self._planner, self._riders = planner, riders
        self._factor_bytes = exchange.bucket_bytes if exchange else 0
        self._open: dict[torch.dtype | str, list[tuple[Any, int]]] = {}
        self._limits: dict[torch.dtype, int] = {}
        self._closed: list[Bucket] = []

    def add_unit(self, unit: Unit, nbytes: int, *, last: bool) -> None:
        """Adds a unit that travels as factors; the last one waits for the riders."""
        if self._add("factors", unit, nbytes) >= self._factor_bytes and not (last and self._riders):
            self._close_factors([])

    def add_param(self, name: str, p: nn.Parameter) -> None:
        """Adds a parameter that travels dense; the first bucket is small, to start early."""
        if self._add(p.dtype, name, p.nbytes) >= self._limits.get(p.dtype, _FIRST_DENSE_BYTES):
            self._close_dense(p.dtype)
            self._limits[p.dtype] = _DENSE_BYTES

    def close(self) -> list[Bucket]:
        """All buckets, the open ones last."""
        for key in list(self._open):
            if isinstance(key, torch.dtype):
                self._close_dense(key)
            else:
                self._close_factors(self._riders)
        return self._closed

    def _add(self, key: torch.dtype | str, member: str | Unit, nbytes: int) -> int:
        members = self._open.setdefault(key, [])
        members.append((member, nbytes))
        return sum(size for _, size in members)

    def _close_factors(self, riders: Sequence[str]) -> None:
        units = [unit for unit, _ in self._open.pop("factors")]
        self._closed.append(self._planner.factor_bucket(len(self._closed), units, riders))

    def _close_dense(self, dtype: torch.dtype) -> None:
        names = [name for name, _ in self._open.pop(dtype)]
        self._closed.append(self._planner.dense_bucket(names))
