"""Packing of units into the messages (buckets) of a step, in the order of the backward pass."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from outergrad.buckets.bucket import Bucket, Load
from outergrad.buckets.dense import DenseBucket
from outergrad.buckets.gather import FactorBucket
from outergrad.buckets.sketch import SketchBucket
from outergrad.buckets.two_way import TwoWayBucket
from outergrad.comm.cost import relays
from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.model import Choice, Compressors, Model
from outergrad.core.owners import heaviest_share, owners
from outergrad.core.types import Route, Slot, Unit

_FIRST_DENSE_BYTES = 1 << 20
_LEAST_DENSE_BYTES = 1 << 21
"""Multiplied by S - 1: a message waits for S - 1 sites twice on its way round a ring."""
_MOST_DENSE_BYTES = 25 << 20
_DENSE_MESSAGES = 16
"""Approximate number for a large model. Each costs some tenths of a millisecond; only the last one
is sent after the backward pass."""
_FEW_DENSE_BYTES = 1 << 18
"""Bytes below which another all-reduce costs more than it gains by starting early."""
_RIDERS_BYTES = 1 << 18
_RIDERS_EXTRA_BYTES = 1 << 14


OF_ROWS = (Route.GATHER, Route.TWO_WAY)
"""Routes whose message lengths depend on the numbers of rows on the sites."""


def loads(model: Model, choice: Choice) -> list[tuple[Load, Route]]:
    """Returns the load and the route of each unit in a step."""
    triples = zip(model.units, choice.routes, choice.tapped, strict=True)
    return [(Load(unit, tapped), route) for unit, route, tapped in triples]


class Packer:
    """Packs units into buckets; every site packs alike."""

    def __init__(self, model: Model, compressors: Compressors, cost: CostModel) -> None:
        self._model, self._compressors, self._cost = model, compressors, cost
        self._dense: dict[Sequence[str], DenseBucket] = {}
        self._owners: dict[Slot | str, int] = {}
        self._in_pieces = False
        self._last: tuple[tuple[Choice, list[Hashable]], list[Bucket]] | None = None
        self._order = tuple(model.params)[::-1]
        self.place: Mapping[str, int] = {}
        """Index of the last plan's bucket of each parameter."""
        self.opening: frozenset[str] = frozenset()
        """Parameters of the last step's first bucket: once they are ready, the plan is made."""

    def buckets(self, choice: Choice) -> list[Bucket]:
        """Returns the buckets of a step in the order in which every site starts them.

        Members are in the reverse order of registration, roughly the order in which the backward
        pass reaches them. A unit has the place of its parameter that is reached last.
        """
        key = choice, self._compressors.phases
        if self._last is None or self._last[0] != key:
            buckets = self._fill(choice)
            self._dense = {b.dense_params: b for b in buckets if isinstance(b, DenseBucket)}
            opening = buckets[0].params if buckets else frozenset[str]()
            self._last, self.opening = (key, buckets), opening
            self.place = {name: k for k, bucket in enumerate(buckets) for name in bucket.params}
        return self._last[1]

    def dense_bucket(self, names: Sequence[str]) -> DenseBucket:
        """Returns a dense bucket of these parameters, if possible that of the last plan."""
        members = {name: self._model.params[name] for name in names}
        return self._dense.get(tuple(names)) or DenseBucket(members)

    def _fill(self, choice: Choice) -> list[Bucket]:
        pairs = zip(loads(self._model, choice), choice.sizes, strict=True)
        units = {
            self._last_param(load.unit): (load, route, size)
            for (load, route), size in pairs
            if route != Route.DENSE
        }
        inside = {name for load, _, _ in units.values() for name in load.unit.params}
        dense = [name for name in self._order if name not in inside]
        ordered = [units[name] for name in self._order if name in units]
        extras = dense if self._may_ride(dense, ordered) else []
        self._owners = self._share_out(ordered, extras)
        late = {name for name in dense if self._may_wait(name)}
        left = sum(self._model.params[name].nbytes for name in dense if name not in late)
        shelf = _Shelf(self, self._compressors, extras, _share_bytes(left, self._cost.sites))
        for name in sorted(self._order, key=late.__contains__):
            if name in units:
                shelf.add_unit(*units.pop(name), last=not units)
            elif name not in inside and not extras:
                left -= 0 if name in late else self._model.params[name].nbytes
                shelf.add_param(name, self._model.params[name], left)
        return shelf.close()

    def bucket(
        self, route: Route, index: int, loads: Sequence[Load], extras: Sequence[str]
    ) -> Bucket:
        """Returns the bucket of these units; their vectors and the extras are uncompressed."""
        compressor = self._compressors[loads[0].unit]
        names = [*(name for load in loads for name in load.vectors), *extras]
        along = {name: self._model.params[name] for name in names}
        if route == Route.GATHER:
            return FactorBucket(index, loads, compressor, along)
        if route == Route.TWO_WAY:
            pieces = self._in_pieces and not any(map(self._is_decided, loads))
            return TwoWayBucket(index, loads, compressor, along, self._owners, in_pieces=pieces)
        return SketchBucket(loads, compressor, self.sketched_in(loads[0]), along)

    def _share_out(
        self, ordered: Sequence[tuple[Load, Route, int]], extras: Sequence[str]
    ) -> dict[Slot | str, int]:
        """Assigns an owner to everything that a site merges, so that all sites send about the same.

        A method that assigns its slots itself assumes equal shares of the rest of its messages.
        """
        loads = [load for load, route, _ in ordered if route == Route.TWO_WAY]
        decided = [load for load in loads if self._is_decided(load)]
        others = [load for load in loads if load not in decided]
        along, beside = self._vector_bytes(decided), self._vector_bytes(others)
        last = along if loads and loads[-1] in decided else beside
        last |= {name: self._model.params[name].nbytes for name in extras}
        for load in others:
            beside |= {slot: self._merged_bytes(load.unit, slot) for slot in load.slots}
        largest = heaviest_share(beside, self._cost.sites)
        self._in_pieces = relays(self._cost, largest, sum(beside.values()))
        return owners(along, self._cost.sites) | owners(beside, self._cost.sites)

    def _vector_bytes(self, loads: Sequence[Load]) -> dict[Slot | str, float]:
        return {name: self._model.params[name].nbytes for load in loads for name in load.vectors}

    def _is_decided(self, load: Load) -> bool:
        merger = self._compressors[load.unit].merger
        return merger is not None and any(merger.owner(slot) is not None for slot in load.slots)

    def _merged_bytes(self, unit: Unit, slot: Slot) -> int:
        merger = self._compressors[unit].merger
        assert merger is not None
        return merger.merged_bytes(slot, merger.merged_rows(slot, [slot.outputs]))

    def sketched_in(self, load: Load) -> torch.dtype:
        """Returns the dtype in which the sketches of a unit are computed."""
        return self._computed_in(load.unit.params)

    def _may_ride(self, dense: Sequence[str], units: Sequence[tuple[Load, Route, int]]) -> bool:
        """True if the dense gradients are so small that they travel in the bucket of the last unit.

        An all-gather sends S / 2 times what a ring all-reduce would: nothing more at two sites. The
        sum must never exceed that of an all-dense model. The two-way route sends as much as a ring.
        """
        if not units:
            return False
        params, cost = self._model.params, self._cost
        factor_bytes, (last, route, _) = sum(size for _, _, size in units), units[-1]
        if route == Route.REDUCE and self._computed_in(dense) != self._computed_in(
            last.unit.params
        ):
            return False
        nbytes = sum(params[name].nbytes for name in dense)
        gathered = nbytes - cost.share(nbytes, Route.DENSE)
        extra = round((cost.sites - 1) * gathered, 6)  # of a float, to compare whole bytes
        total = sum(p.nbytes for p in params.values())
        fits = nbytes + factor_bytes <= cost.share(total, Route.DENSE)
        if route == Route.TWO_WAY:
            return nbytes <= _RIDERS_BYTES
        small = nbytes <= _RIDERS_BYTES and extra < _RIDERS_EXTRA_BYTES + 1
        return bool(factor_bytes) and small and fits

    def _may_wait(self, name: str) -> bool:
        """True if a parameter is a short vector, which travels with the last matrix.

        Parameters of norms are often ready later than their place in the model suggests: a norm
        that runs before a layer may be registered after it. Buckets of matrices do not wait for so
        few bytes.
        """
        p = self._model.params[name]
        return p.dim() < 2 and p.nbytes < _FEW_DENSE_BYTES

    def _computed_in(self, names: Sequence[str]) -> torch.dtype:
        dtypes = {self._model.params[name].dtype for name in names}
        return reduce(torch.promote_types, dtypes, torch.float32)

    def _last_param(self, unit: Unit) -> str:
        return max(unit.params, key=self._order.index)


_Shelved = tuple[Route, torch.dtype, Compressor | None]
"""Key of a bucket: a method's rows, its sketches of one dtype, or gradients of one dtype."""


class _Shelf:
    """Buckets that are being filled, one per key.

    Args:
        packer: makes the buckets.
        compressors: give the size at which a bucket of factors is full (`bucket_bytes`).
        extras: parameters that travel in the bucket of the last unit.
        share_bytes: size in bytes at which a dense bucket is full, except the first.
    """

    def __init__(
        self, packer: Packer, compressors: Compressors, extras: Sequence[str], share_bytes: int
    ) -> None:
        self._packer, self._compressors, self._extras = packer, compressors, extras
        self._share_bytes = share_bytes
        self._open: dict[_Shelved, list[tuple[Any, int]]] = {}
        self._limits: dict[_Shelved, int] = {}
        self._closed: list[Bucket] = []

    def add_unit(self, load: Load, route: Route, nbytes: int, *, last: bool) -> None:
        """Adds a unit that travels as factors or sketches; the last one takes the extras."""
        dtype = torch.float32 if route in OF_ROWS else self._packer.sketched_in(load)
        compressor = self._compressors[load.unit]
        key = route, dtype, compressor
        full = self._add(key, load, nbytes) >= compressor.bucket_bytes
        if full or (last and self._extras):
            self._close(key, self._extras if last else ())

    def add_param(self, name: str, p: nn.Parameter, left: int) -> None:
        """Adds a parameter that travels dense; the first bucket is small, to start early.

        Args:
            name: full name of the parameter.
            p: the parameter.
            left: bytes of the dense parameters still to come, without those that may wait. The
                latter join the last bucket of the others, and a small rest joins the first bucket.
        """
        key = Route.DENSE, p.dtype, None
        takes_rest = left == 0 or (key not in self._limits and left < _FEW_DENSE_BYTES)
        full = self._add(key, name, p.nbytes) >= self._limits.get(key, _FIRST_DENSE_BYTES)
        if full and not takes_rest:
            self._close(key)
            self._limits[key] = self._share_bytes if p.is_cpu else _MOST_DENSE_BYTES

    def close(self) -> list[Bucket]:
        for key in list(self._open):
            self._close(key)
        return self._closed

    def _add(self, key: _Shelved, member: str | Load, nbytes: int) -> int:
        members = self._open.setdefault(key, [])
        members.append((member, nbytes))
        return sum(size for _, size in members)

    def _close(self, key: _Shelved, extras: Sequence[str] = ()) -> None:
        members = [member for member, _ in self._open.pop(key)]
        if key[0] == Route.DENSE:
            bucket = self._packer.dense_bucket(members)
        else:
            bucket = self._packer.bucket(key[0], len(self._closed), members, extras)
        self._closed.append(bucket)


def _share_bytes(dense_bytes: int, sites: int) -> int:
    """Returns the size in bytes at which a dense bucket, except the first, is full.

    Args:
        dense_bytes: bytes of the parameters that travel dense, without those that may wait.
        sites: number of sites (S).
    """
    least = _LEAST_DENSE_BYTES * max(sites - 1, 1)
    return min(max(dense_bytes // _DENSE_MESSAGES, least), _MOST_DENSE_BYTES)
