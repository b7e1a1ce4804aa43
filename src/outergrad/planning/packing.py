"""From how units travel to the messages of a step, in the order of backward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from outergrad.buckets.bucket import Bucket, Load
from outergrad.buckets.dense import DenseBucket
from outergrad.buckets.gather import FactorBucket
from outergrad.buckets.sketch import SketchBucket
from outergrad.buckets.two_way import TwoWayBucket
from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.model import Choice, Compressors, Model
from outergrad.core.owners import owners
from outergrad.core.types import Route, Slot, Unit

_FIRST_DENSE_BYTES = 1 << 20
_LEAST_DENSE_BYTES = 1 << 21
"""Times S - 1: a message waits for as many sites twice on its way round a ring."""
_MOST_DENSE_BYTES = 25 << 20
_DENSE_MESSAGES = 16
"""Of a large model, about: each costs some tenths of a millisecond, and what the last one brings is
all that is sent when backward is over."""
_FEW_DENSE_BYTES = 1 << 18
"""Another all-reduce costs more than it gains by starting before so few have been computed."""
_RIDERS_BYTES = 1 << 18
_RIDERS_EXTRA_BYTES = 1 << 14


OF_ROWS = (Route.GATHER, Route.TWO_WAY)
"""Ways of which the messages' lengths follow from the rows of the sites."""


def loads(model: Model, choice: Choice) -> list[tuple[Load, Route]]:
    """What the units put into messages, and how."""
    triples = zip(model.units, choice.routes, choice.tapped, strict=True)
    return [(Load(unit, tapped), route) for unit, route, tapped in triples]


class Packer:
    """Fills messages; every site does it alike."""

    def __init__(self, model: Model, compressors: Compressors, cost: CostModel) -> None:
        self._model, self._compressors, self._cost = model, compressors, cost
        self._dense: dict[Sequence[str], DenseBucket] = {}
        self._owners: dict[Slot | str, int] = {}
        self._last: tuple[tuple[Choice, list[Hashable]], list[Bucket]] | None = None
        self._order = tuple(model.params)[::-1]
        self.opening: frozenset[str] = frozenset()
        """Parameters of the first message of the last step: when they are ready, it is time."""

    def buckets(self, choice: Choice) -> list[Bucket]:
        """The messages of a step in the order in which every site starts them.

        Members come in the reverse order of registration, about that in which backward reaches
        them; a unit stands where its last parameter is reached.
        """
        key = choice, self._compressors.phases
        if self._last is None or self._last[0] != key:
            buckets = self._fill(choice)
            self._dense = {b.dense_params: b for b in buckets if isinstance(b, DenseBucket)}
            opening = buckets[0].params if buckets else frozenset[str]()
            self._last, self.opening = (key, buckets), opening
        return self._last[1]

    def dense_bucket(self, names: Sequence[str]) -> DenseBucket:
        """The bucket of these parameters, with its buffer if the last plan had it, too."""
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
        """The message of these units, with these parameters and their own vectors along."""
        compressor = self._compressors[loads[0].unit]
        names = [*(name for load in loads for name in load.vectors), *extras]
        along = {name: self._model.params[name] for name in names}
        if route == Route.GATHER:
            return FactorBucket(index, loads, compressor, along)
        if route == Route.TWO_WAY:
            return TwoWayBucket(index, loads, compressor, along, self._owners)
        return SketchBucket(loads, compressor, self.sketched_in(loads[0]), along)

    def _share_out(
        self, ordered: Sequence[tuple[Load, Route, int]], extras: Sequence[str]
    ) -> dict[Slot | str, int]:
        """Who merges what, so that all sites send about the same in a step.

        A method that shares out its slots by itself counts on equal shares of all that is along.
        """
        loads = [load for load, route, _ in ordered if route == Route.TWO_WAY]
        decided = [load for load in loads if self._is_decided(load)]
        others = [load for load in loads if load not in decided]
        along, beside = self._vector_bytes(decided), self._vector_bytes(others)
        last = along if loads and loads[-1] in decided else beside
        last |= {name: self._model.params[name].nbytes for name in extras}
        for load in others:
            beside |= {slot: self._merged_bytes(load.unit, slot) for slot in load.slots}
        return owners(along, self._cost.sites) | owners(beside, self._cost.sites)

    def _vector_bytes(self, loads: Sequence[Load]) -> dict[Slot | str, float]:
        return {name: self._model.params[name].nbytes for load in loads for name in load.vectors}

    def _is_decided(self, load: Load) -> bool:
        merger = self._compressors[load.unit].merger
        return merger is not None and any(merger.owner(slot) is not None for slot in load.slots)

    def _merged_bytes(self, unit: Unit, slot: Slot) -> int:
        merger = self._compressors[unit].merger
        assert merger is not None
        rows = merger.merged_rows(slot, [slot.outputs])
        return 4 * rows * slot.groups * (slot.inputs + slot.outputs)

    def sketched_in(self, load: Load) -> torch.dtype:
        """What the sketches of a unit are computed in."""
        return self._computed_in(load.unit.params)

    def _may_ride(self, dense: Sequence[str], units: Sequence[tuple[Load, Route, int]]) -> bool:
        """Whether the dense gradients are so small that they go along with the last unit.

        An all-gather sends S / 2 times what a ring would: nothing more at two sites, and never
        more in sum than if the whole model travelled dense. Two ways send as much.
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
        """Whether a parameter is a short vector, and goes along with the last matrix.

        Those of norms are often ready later than their place in the model says: a norm before a
        layer, that is registered behind it. Messages of matrices do not wait for so few bytes.
        """
        p = self._model.params[name]
        return p.dim() < 2 and p.nbytes < _FEW_DENSE_BYTES

    def _computed_in(self, names: Sequence[str]) -> torch.dtype:
        dtypes = {self._model.params[name].dtype for name in names}
        return reduce(torch.promote_types, dtypes, torch.float32)

    def _last_param(self, unit: Unit) -> str:
        return max(unit.params, key=self._order.index)


_Shelved = tuple[Route, torch.dtype, Compressor | None]
"""What shares a message: one method's rows of any dtype or its sketches of one; or gradients."""


class _Shelf:
    """Buckets being filled: per method one of rows, one of sketches per dtype; one of gradients.

    Args:
        packer: makes the buckets.
        compressors: say how large a bucket of factors becomes.
        extras: parameters that go along with the last unit's bucket.
        share_bytes: from which on a bucket of gradients is full, behind the first.
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
            name: of the parameter.
            p: itself.
            left: bytes of those that are still to come, but for those that may wait. These go
                along with the last of the others, and a few of the others with the first bucket.
        """
        key = Route.DENSE, p.dtype, None
        takes_rest = left == 0 or (key not in self._limits and left < _FEW_DENSE_BYTES)
        full = self._add(key, name, p.nbytes) >= self._limits.get(key, _FIRST_DENSE_BYTES)
        if full and not takes_rest:
            self._close(key)
            self._limits[key] = self._share_bytes if p.is_cpu else _MOST_DENSE_BYTES

    def close(self) -> list[Bucket]:
        """All buckets, the open ones last."""
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
    """From which on a bucket of gradients is full, behind the first.

    Args:
        dense_bytes: of the parameters that travel dense, but for those that may wait.
        sites: S.
    """
    least = _LEAST_DENSE_BYTES * max(sites - 1, 1)
    return min(max(dense_bytes // _DENSE_MESSAGES, least), _MOST_DENSE_BYTES)
