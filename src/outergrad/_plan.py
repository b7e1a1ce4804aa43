"""What travels how and in which order: the same on every site, from agreed facts alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from outergrad._bucket import Bucket, Load
from outergrad._dense_bucket import DenseBucket
from outergrad._factor_bucket import FactorBucket
from outergrad._foresight import Foresight
from outergrad._message import Cargo
from outergrad._sketch_bucket import SketchBucket
from outergrad._two_way_bucket import TwoWayBucket
from outergrad._types import Exchange, Route, Slot, Unit
from outergrad.comm.wire import Header
from outergrad.exchange._owners import owners

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
        params: Mapping[str, nn.Parameter],
        slots: Sequence[Slot],
        reasons: Mapping[str, str],
        plain: Sequence[str] = (),
    ) -> Model:
        """Groups the slots into units.

        Args:
            params: as above.
            slots: as above.
            reasons: as above.
            plain: weights without slots that are units, too, of their formed gradients.
        """
        units = [_unit(group, params) for group in _connected(slots)]
        units += [Unit((), (n,), params[n].numel(), (_matrix(n, params[n]),)) for n in plain]
        return Model(params, tuple(slots), tuple(units), reasons)


def _unit(slots: Sequence[Slot], params: Mapping[str, Tensor]) -> Unit:
    names = tuple(dict.fromkeys(name for slot in slots for name in slot.params))
    dense_numel = sum(params[name].numel() for name in names)
    return Unit(tuple(slots), names, dense_numel, _matrices(slots, params))


def _matrices(slots: Sequence[Slot], params: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    """See `Unit.matrices`."""
    weights = {slot.weight: params[slot.weight] for slot in slots}
    overlap = any(a.overlaps(b) for i, a in enumerate(slots) for b in slots[i + 1 :])
    if overlap or any(slot.lookup for slot in slots):
        return tuple(_matrix(name, p, slots[0].layer) for name, p in weights.items())
    parts = tuple(replace(slot, bias=None, bias_rows=None) for slot in slots)
    covered = sum(part.groups * part.outputs * part.inputs for part in parts)
    return parts if covered == sum(p.numel() for p in weights.values()) else ()


def _matrix(name: str, p: Tensor, layer: str = "") -> Slot:
    """The first dimension by all others."""
    return Slot(layer, name, p.shape[0], p.numel() // p.shape[0])


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
        routes: per unit, how it travels in this step.
        tapped: per unit, whether all sites have its factors.
        wanted: per unit, whether it should be tapped in the next forward.
        sizes: per unit, bytes of its part in a message on the site that has most; 0 if dense.
        words: per unit, how it travels and why, for the coverage table.
    """

    routes: tuple[Route, ...]
    tapped: tuple[bool, ...]
    wanted: tuple[bool, ...]
    sizes: tuple[int, ...]
    words: tuple[str, ...] = field(compare=False)


class Planner:
    """Turns headers into buckets; every site computes the same."""

    def __init__(self, model: Model, exchange: Exchange | None, sites: int) -> None:
        self._model, self._exchange, self._sites = model, exchange, sites
        self._slot_index = {slot: k for k, slot in enumerate(model.slots)}
        self._sketches = None if exchange is None else exchange.sketches
        self._merger = None if exchange is None else exchange.merger
        self._mixed: set[Unit] = set()
        self._dense: dict[Sequence[str], DenseBucket] = {}
        self._owners: dict[Slot | str, int] = {}
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
        return tuple(
            bool(unit.slots) and exchange.break_even(unit, self._sites) > 1
            for unit in self._model.units
        )

    def mark_mixed(self, names: Sequence[str]) -> None:
        """Sends units of these parameters dense from now on: they also have a dense part."""
        self._mixed |= {u for u in self._model.units if set(u.params) & set(names)}
        self.foresight.forget()

    @property
    def mixed(self) -> list[str]:
        """Parameters that travel dense because they have a dense part, too."""
        return [name for unit in self._model.units if unit in self._mixed for name in unit.params]

    def resume(self, mixed: Sequence[str]) -> None:
        """Goes on from a saved step, with the `mixed` of then."""
        self._mixed.clear()
        self.mark_mixed(mixed)

    def facts(self, headers: Sequence[Header]) -> Hashable:
        """What the headers decide: the choice, the length of every message, who has gradients."""
        choice = self.choose(headers)
        loads = [load for load, route in self._loads(choice) if route in _OF_ROWS]
        slots = [slot for load in loads if load.tapped for slot in load.slots]
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
        exchange, units = self._exchange, self._model.units
        if exchange is None:
            return Choice((), (), (), (), ())
        routes, all_tapped, wanted, sizes, words = [], [], [], [], []
        for unit in units:
            index = [self._slot_index[slot] for slot in unit.slots]
            rows_SK = [[header.uses[k].rows for k in index] for header in headers]
            taps = self._taps(unit, rows_SK)
            tapped = taps and all(h.uses[k].tapped for h in headers for k in index)
            route = exchange.route(unit, rows_SK, tapped=tapped)
            load = Load(unit, tapped)
            routes.append(route)
            all_tapped.append(tapped)
            wanted.append(taps)
            sizes.append(self._largest_size(load, rows_SK) if route != Route.DENSE else 0)
            words.append(self._why(load, route, rows_SK, wanted=taps))
        return Choice(tuple(routes), tuple(all_tapped), tuple(wanted), tuple(sizes), tuple(words))

    def pays(self, unit: Unit, rows_K: Sequence[int]) -> bool:
        """Whether a unit would be tapped if every site had so many rows per slot (K)."""
        return self._taps(unit, [rows_K] * self._sites)

    def _taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        exchange = self._exchange
        if exchange is None or not unit.slots or unit in self._mixed:
            return False
        return exchange.taps(unit, rows_SK)

    def _why(
        self, load: Load, route: Route, rows_SK: Sequence[Sequence[int]], *, wanted: bool
    ) -> str:
        """In words: "factors", "low rank: " how, or why dense; "{pays}" is when factors pay."""
        unit, exchange = load.unit, self._exchange
        note = f"; {exchange.way_note}" if exchange and exchange.way_note else ""
        if route == Route.GATHER and load.tapped:
            return f"factors{note}"
        if route != Route.DENSE:
            source = "factors" if load.tapped else "the formed gradient"
            return f"low rank: {_WAYS[route]} of {source}{note}"
        if wanted:
            return "accumulated, or not tapped in the last step; {pays}"
        if unit in self._mixed:
            return "the weight is also used outside its layer"
        if any(a.overlaps(b) for i, a in enumerate(unit.slots) for b in unit.slots[i + 1 :]):
            return "shared by several products; {pays}"
        return f"{max(map(sum, rows_SK))} rows; {{pays}}"

    def _loads(self, choice: Choice) -> list[tuple[Load, Route]]:
        """What the units put into messages, and how."""
        triples = zip(self._model.units, choice.routes, choice.tapped, strict=True)
        return [(Load(unit, tapped), route) for unit, route, tapped in triples]

    def _largest_size(self, load: Load, rows_SK: Sequence[Sequence[int]]) -> int:
        return max(self._size(load, rows_K, site) for site, rows_K in enumerate(rows_SK))

    def _size(self, load: Load, rows_K: Sequence[int], site: int) -> int:
        exchange, numel = self._exchange, 0
        assert exchange is not None
        rows = rows_K if load.tapped else [matrix.outputs for matrix in load.slots]
        for slot, n in zip(load.slots, rows, strict=True):
            width = slot.groups * (slot.inputs * (not slot.lookup) + slot.outputs)
            numel += width * (exchange.sent_rows(slot, n, site) if n else 0)
        return 4 * (numel + sum(self._model.params[name].numel() for name in load.vectors))

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
        pairs = zip(self._loads(choice), choice.sizes, strict=True)
        units = {
            self._last_param(load.unit): (load, route, size)
            for (load, route), size in pairs
            if route != Route.DENSE
        }
        inside = {name for load, _, _ in units.values() for name in load.unit.params}
        dense = [name for name in self._order if name not in inside]
        ordered = [units[name] for name in self._order if name in units]
        riders = dense if self._may_ride(dense, ordered) else []
        self._owners = self._share_out(ordered, riders)
        shelf = _Shelf(self, self._exchange, riders)
        for name in self._order:
            if name in units:
                shelf.add_unit(*units.pop(name), last=not units)
            elif name not in inside and not riders:
                shelf.add_param(name, self._model.params[name])
        return shelf.close()

    def factor_bucket(
        self, index: int, loads: Sequence[Load], riders: Sequence[str]
    ) -> FactorBucket:
        """The message of these units, with these parameters and their own vectors along."""
        assert self._exchange is not None
        return FactorBucket(Cargo(index, loads, self._exchange, self._along(loads, riders)))

    def two_way_bucket(
        self, index: int, loads: Sequence[Load], riders: Sequence[str]
    ) -> TwoWayBucket:
        """The two messages of these units, with these parameters and their own vectors along."""
        assert self._exchange is not None
        assert self._merger is not None
        cargo = Cargo(index, loads, self._exchange, self._along(loads, riders))
        return TwoWayBucket(cargo, self._merger, self._owners)

    def _share_out(
        self, ordered: Sequence[tuple[Load, Route, int]], riders: Sequence[str]
    ) -> dict[Slot | str, int]:
        """Who merges what, so that all sites send about the same in a step."""
        loads = [load for load, route, _ in ordered if route == Route.TWO_WAY]
        if not loads or self._merger is None:
            return {}
        names = [*(name for load in loads for name in load.vectors), *riders]
        sizes: dict[Slot | str, float] = {n: self._model.params[n].nbytes for n in names}
        for slot in (slot for load in loads for slot in load.slots):
            rows = self._merger.merged_rows(slot, [slot.outputs])
            sizes[slot] = 4 * rows * slot.groups * (slot.inputs + slot.outputs)
        return owners(sizes, self._sites)

    def sketch_bucket(self, loads: Sequence[Load], riders: Sequence[str]) -> SketchBucket:
        """The two messages of these units, with these parameters and their own vectors along."""
        assert self._exchange is not None
        assert self._sketches is not None
        along = self._along(loads, riders)
        dtype = self.sketched_in(loads[0])
        return SketchBucket(loads, self._sketches, dtype, self._exchange.wire, along)

    def sketched_in(self, load: Load) -> torch.dtype:
        """What the sketches of a unit are computed in."""
        return self._computed_in(load.unit.params)

    def _along(self, loads: Sequence[Load], riders: Sequence[str]) -> dict[str, nn.Parameter]:
        names = [*(name for load in loads for name in load.vectors), *riders]
        return {name: self._model.params[name] for name in names}

    def _may_ride(self, dense: Sequence[str], units: Sequence[tuple[Load, Route, int]]) -> bool:
        """Whether the dense gradients are so small that they go along with the last unit.

        An all-gather sends S / 2 times what an all-reduce would: nothing more at two sites, and
        never more in sum than if the whole model travelled dense. Two ways send as much.
        """
        if not units:
            return False
        params, sites = self._model.params, self._sites
        factor_bytes, (last, route, _) = sum(size for _, _, size in units), units[-1]
        if route == Route.REDUCE and self._computed_in(dense) != self._computed_in(
            last.unit.params
        ):
            return False
        nbytes = sum(params[name].nbytes for name in dense)
        extra = nbytes * (sites - 1) * (sites - 2) // sites
        total = sum(p.nbytes for p in params.values())
        fits = (nbytes + factor_bytes) * sites <= 2 * total
        if route == Route.TWO_WAY:
            return nbytes <= _RIDERS_BYTES
        small = nbytes <= _RIDERS_BYTES and extra <= _RIDERS_EXTRA_BYTES
        return bool(factor_bytes) and small and fits

    def _computed_in(self, names: Sequence[str]) -> torch.dtype:
        dtypes = {self._model.params[name].dtype for name in names}
        return reduce(torch.promote_types, dtypes, torch.float32)

    def _last_param(self, unit: Unit) -> str:
        return max(unit.params, key=self._order.index)


_OF_ROWS = (Route.GATHER, Route.TWO_WAY)
"""Ways of which the messages' lengths follow from the rows of the sites."""

_WAYS = {
    Route.GATHER: "triplets",
    Route.TWO_WAY: "merged triplets",
    Route.REDUCE: "sketches",
}

_Shelved = tuple[Route, torch.dtype]
"""What shares a message: rows of any dtype, sketches or gradients of one."""


class _Shelf:
    """Buckets being filled: one of factors, and one of sketches and one of gradients per dtype.

    Args:
        planner: makes the buckets.
        exchange: says how large a bucket of factors becomes.
        riders: parameters that go along with the last unit's bucket.
    """

    def __init__(self, planner: Planner, exchange: Exchange | None, riders: Sequence[str]) -> None:
        self._planner, self._riders = planner, riders
        self._bucket_bytes = exchange.bucket_bytes if exchange else 0
        self._open: dict[_Shelved, list[tuple[Any, int]]] = {}
        self._limits: dict[_Shelved, int] = {}
        self._closed: list[Bucket] = []

    def add_unit(self, load: Load, route: Route, nbytes: int, *, last: bool) -> None:
        """Adds a unit that travels as factors or sketches; the last one takes the riders."""
        key = route, torch.float32 if route in _OF_ROWS else self._planner.sketched_in(load)
        full = self._add(key, load, nbytes) >= self._bucket_bytes
        if full or (last and self._riders):
            self._close(key, self._riders if last else ())

    def add_param(self, name: str, p: nn.Parameter) -> None:
        """Adds a parameter that travels dense; the first bucket is small, to start early."""
        key = Route.DENSE, p.dtype
        if self._add(key, name, p.nbytes) >= self._limits.get(key, _FIRST_DENSE_BYTES):
            self._close(key)
            self._limits[key] = _DENSE_BYTES

    def close(self) -> list[Bucket]:
        """All buckets, the open ones last."""
        for key in list(self._open):
            self._close(key)
        return self._closed

    def _add(self, key: _Shelved, member: str | Load, nbytes: int) -> int:
        members = self._open.setdefault(key, [])
        members.append((member, nbytes))
        return sum(size for _, size in members)

    def _close(self, key: _Shelved, riders: Sequence[str] = ()) -> None:
        members = [member for member, _ in self._open.pop(key)]
        planner, route = self._planner, key[0]
        if route == Route.DENSE:
            bucket = planner.dense_bucket(members)
        elif route == Route.GATHER:
            bucket = planner.factor_bucket(len(self._closed), members, riders)
        elif route == Route.TWO_WAY:
            bucket = planner.two_way_bucket(len(self._closed), members, riders)
        else:
            bucket = planner.sketch_bucket(members, riders)
        self._closed.append(bucket)
