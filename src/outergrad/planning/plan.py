"""The plan of a step, i.e. how each unit travels; computed alike on every site from headers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from outergrad.buckets.bucket import Load
from outergrad.core.blocks import UNSENDABLE, Block
from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.model import Choice, Compressors, Model
from outergrad.core.reasons import Reason, Why
from outergrad.core.residual_store import ResidualStore
from outergrad.core.transform import Projection
from outergrad.core.types import Gradient, Route, Slot, Source, Unit, overlapping
from outergrad.messages.header import Header
from outergrad.planning.header_cache import HeaderCache
from outergrad.planning.packing import OF_ROWS, Packer, loads


def why_block(nbytes: int, *, tapped: bool, tap_next: bool, outside: bool) -> Reason:
    """Returns the reason for the route of a block.

    Args:
        nbytes: bytes of the block on the site that sends most of it.
        tapped: whether it was captured on every site.
        tap_next: whether it will be captured in the next step.
        outside: whether its parameters also have a gradient outside it.
    """
    if tapped:
        return Reason(why=Why.REPLAYED)
    if tap_next:
        return Reason(why=Why.NOT_CAPTURED)
    if outside:
        return Reason(why=Why.USED_OUTSIDE_BLOCK)
    if nbytes >= UNSENDABLE:
        return Reason(why=Why.UNSENDABLE)
    return Reason(why=Why.BYTES, nbytes=nbytes)


def why_unit(
    load: Load, route: Route, compressor: Compressor, *, tap_next: bool, outside: bool
) -> Reason:
    """Returns the reason for the route of layers; the flags are those of `why_block`."""
    unit, auto, why = load.unit, compressor.auto_way, compressor.why
    if route == Route.GATHER and load.tapped:
        return Reason(why=Why.FACTORS, auto=auto)
    if route != Route.DENSE:
        return Reason(why=why, route=route, tapped=load.tapped, auto=auto)
    if why == Why.DENSE:
        return Reason(why=Why.DENSE)
    if tap_next:
        return Reason(why=Why.NOT_TAPPED)
    if outside:
        return Reason(why=Why.USED_OUTSIDE_LAYER)
    return Reason(why=Why.OVERLAPPING if overlapping(unit.slots) else Why.ROWS)


_MOST_CACHES = 8
"""Number of header caches that are kept, one per combination of methods that alternate."""


class _Decision(NamedTuple):
    """Decision on one unit, with the fields of `Choice`."""

    route: Route
    tapped: bool
    tap_next: bool
    size: int
    reason: Reason


_WHOLE = _Decision(Route.DENSE, False, False, 0, Reason(why=Why.WHOLE))
"""Decision on every unit of a step in which a site asks for all that is owed."""


class Planner:
    """Derives from the headers of all sites how each unit travels; every site computes the same.

    Args:
        model: the trainable part of the model.
        compressors: compressors of its units.
        cost: cost model of the transport.
        units: units whose steps end with those of the model; those of the model by default.
    """

    def __init__(
        self,
        model: Model,
        compressors: Compressors,
        cost: CostModel,
        units: Iterable[Unit] | None = None,
    ) -> None:
        self._model, self._compressors = model, compressors
        self._units = frozenset(model.units if units is None else units)
        self._index = model.index
        self._has_autograd_grad: set[Unit] = set()
        """Units that travel dense: autograd has a gradient for them besides their factors."""
        self.begin_anew(cost)

    def begin_anew(self, cost: CostModel) -> None:
        """Forgets everything about earlier steps, and sets the cost model."""
        model, compressors, self._cost = self._model, self._compressors, cost
        self._has_autograd_grad.clear()
        self._outside: set[str] = set()
        self._last: tuple[list[Hashable], list[tuple[Hashable, ...]], Choice] | None = None
        """Inputs of the last choice (`_known` and the facts of all headers), and the choice."""
        self._decisions: dict[Unit, tuple[Sequence[Hashable], _Decision]] = {}
        """Last decision on each unit, and the uses that it follows from while `_known` is equal."""
        self._phases = compressors.phases
        self._used: Collection[str] = ()
        self._adopted: Choice | None = None
        self._memories: dict[str, list[tuple[ResidualStore, Slot]]] = {}
        """Residual stores of each parameter that travels dense in this step."""
        self._paid: list[tuple[ResidualStore, Slot]] = []
        self.packer = Packer(model, compressors, cost)
        self.header_cache = HeaderCache(self.facts, self._ways)
        self._header_caches = {str(self._phases): self.header_cache}

    def of(self, model: Model) -> Planner:
        """Returns the planner of a part of the model; both share `has_autograd_grad`."""
        part = Planner(model, self._compressors, self._cost)
        part._has_autograd_grad = self._has_autograd_grad
        return part

    def first_tap_next(self) -> tuple[bool, ...]:
        """Flags the units to tap before rows are known: those that may pay with a single row."""
        sites, compressors = self._cost.sites, self._compressors
        return tuple(
            bool(unit.sources) and compressors[unit].break_even(unit, sites) > 1
            for unit in self._model.units
        )

    def note_autograd_grad(self, names: Sequence[str], headers: Sequence[Header]) -> None:
        """Records parameters for which autograd had a gradient although their products were tapped.

        If no product of a parameter was captured, the next step may tap it again, unless this was
        the case in the step before, too: a custom function that differentiates its own parameters
        has nothing to tap in any step.
        """
        outside = {name for name in names if not self._captures(name, headers)}
        self.mark_autograd_grad([n for n in names if n not in outside or n in self._outside])
        self._outside = outside

    def mark_autograd_grad(self, names: Sequence[str]) -> None:
        """Sends units of these parameters dense from now on: autograd has gradients for them."""
        self._has_autograd_grad |= {u for u in self._model.units if set(u.params) & set(names)}
        self._last = None
        self.forget_headers()

    @property
    def has_autograd_grad(self) -> list[str]:
        """Parameters that travel dense because autograd has gradients besides their factors."""
        return [
            name
            for unit in self._model.units
            if unit in self._has_autograd_grad
            for name in unit.params
        ]

    def resume(self, has_autograd_grad: Sequence[str]) -> None:
        """Restores `has_autograd_grad` from a saved step."""
        self._has_autograd_grad.clear()
        self.mark_autograd_grad(has_autograd_grad)

    def facts(self, headers: Sequence[Header]) -> Hashable:
        """Returns what headers decide: the choice, message lengths, and facts of the loops."""
        choice = self.choose(headers)
        of_rows = [load for load, route in loads(self._model, choice) if route in OF_ROWS]
        sources = [(x.unit, source) for x in of_rows if x.tapped for source in x.unit.sources]
        pieces = tuple(self._piece(*pair, header) for pair in sources for header in headers)
        return choice, pieces, tuple(header.about_loop for header in headers)

    def _ways(self, headers: Sequence[Header]) -> Hashable:
        choice = self.choose(headers)
        return choice.routes, choice.tap_next

    def _piece(self, unit: Unit, source: Source, header: Header) -> tuple[int, torch.dtype]:
        use = header.uses[self._index[source]]
        if isinstance(source, Block):
            return use.rows, use.dtype
        return self._compressors[unit].sent_rows(source, use.rows, header.rank), use.dtype

    def begin(self, step: int) -> None:
        """Begins a step, in which methods may have changed."""
        if self._compressors.begin(step, self._cost.sites):
            self._last = None
        if self._phases != self._compressors.phases:
            self._phases = self._compressors.phases
            self._change_cache(str(self._phases))

    def _change_cache(self, key: str) -> None:
        """Forgets predictions; if a chooser alternates methods, switches to the cache of these."""
        if self._compressors.chooser is None:
            self.header_cache.forget()
            return
        before, new = self.header_cache, HeaderCache(self.facts, self._ways)
        self.header_cache = self._header_caches.pop(key, new)
        self.header_cache.follow(before)
        self._header_caches[key] = self.header_cache
        if len(self._header_caches) > _MOST_CACHES:
            del self._header_caches[next(iter(self._header_caches))]

    def forget_headers(self) -> None:
        """Forgets all predictions, whatever the methods."""
        for cache in self._header_caches.values():
            cache.forget()

    def adopt(self, headers: Sequence[Header], used: Collection[str]) -> Choice:
        """Returns how the units travel in this step, and makes this the current plan.

        Args:
            headers: headers of all sites.
            used: parameters that have a gradient on some site.
        """
        choice, self._used, self._paid = self.choose(headers), used, []
        if choice is not self._adopted:
            self._adopted, self._memories = choice, {}
            routes = zip(self._model.units, choice.routes, strict=True)
            for unit in (unit for unit, route in routes if route == Route.DENSE):
                for one, slot in self._compressors.memories(unit):
                    self._memories.setdefault(slot.weight, []).append((one, slot))
        return choice

    def owed(self, name: str) -> list[tuple[Slot, Gradient]]:
        """Returns the residuals of a parameter that travels dense, by slot, not divided by S.

        The step sends them whole. They are forgotten if it counts and some site uses the parameter.
        """
        found = []
        for one, slot in self._memories.get(name, ()):
            residual = one.residual(slot)
            if residual is not None:
                found.append((slot, residual))
                self._paid.append((one, slot))
        return found

    def unsent(self) -> Iterator[tuple[Slot, Gradient]]:
        """Yields the residuals of all parameters, by slot, not divided by S."""
        for unit in self._model.units:
            for one, slot in self._compressors.memories(unit):
                residual = one.residual(slot)
                if residual is not None:
                    yield slot, residual

    def known_of(self, unit: Unit, device: torch.device) -> dict[str, Projection]:
        """Returns what is sent of a unit's weights, by name, as far as it is known before."""
        return self._compressors.known_of(unit, device)

    def owes(self) -> bool:
        """True if `owed` may return a residual for some parameter."""
        return bool(self._memories)

    def commit(self, *, applied: bool) -> None:
        """Ends a step for the compressors of the model, alike on all sites."""
        self._compressors.commit(self._units, applied=applied, used=self._used)
        for one, slot in self._paid if applied else ():
            if slot.weight in self._used:
                one.hand_over([slot])
        self._paid = []

    def _captures(self, name: str, headers: Sequence[Header]) -> bool:
        """True if some site announced rows for a product of the parameter, or it is in a block."""
        slots = [self._index[slot] for slot in self._model.slots if name in slot.params]
        in_block = any(name in block.params for block in self._model.blocks)
        return in_block or any(header.uses[k].rows for header in headers for k in slots)

    def choose(self, headers: Sequence[Header]) -> Choice:
        """Returns the choice that follows from the headers of all sites; cached for equal ones."""
        known, facts = self._known(self._compressors.phases), [header.facts for header in headers]
        last = self._last
        if last is None or last[:2] != (known, facts):
            if last is None or last[0] != known:
                self._decisions = {}
            last = self._last = known, facts, self._chosen(headers)
        return last[2]

    def repeats(
        self, choice: Choice, headers: Sequence[Header], used: Collection[str], step: int
    ) -> bool:
        """Begins a step; returns True if it has the plan of the last one, which it adopts again.

        Args:
            choice: choice of the last step.
            headers: `header_cache.known` in the last step.
            used: parameters that have a gradient on some site, in the last step.
            step: number of the step that begins.
        """
        self.begin(step)
        last = self._last
        if last is None or last[2] is not choice or choice is not self._adopted:
            return False
        if not self.header_cache.foresees(headers) or last[0] != self._known(self._phases):
            return False
        self._used, self._paid = used, []
        return True

    def _known(self, phases: Sequence[Hashable]) -> list[Hashable]:
        """Inputs of a choice besides headers."""
        return [len(self._has_autograd_grad), *phases, self._compressors.ahead]

    def _chosen(self, headers: Sequence[Header]) -> Choice:
        if any(header.whole for header in headers):
            decided = [_WHOLE] * len(self._model.units)
        else:
            decided = [self._decision(unit, headers) for unit in self._model.units]
        return Choice(*zip(*decided, strict=True)) if decided else Choice((), (), (), (), ())

    def _decision(self, unit: Unit, headers: Sequence[Header]) -> _Decision:
        uses = [header.uses[self._index[x]] for x in unit.sources for header in headers]
        last = self._decisions.get(unit)
        if last is None or last[0] != uses:
            last = self._decisions[unit] = uses, self._decided(unit, headers)
        return last[1]

    def _decided(self, unit: Unit, headers: Sequence[Header]) -> _Decision:
        index = [self._index[source] for source in unit.sources]
        rows_SK = [[header.uses[k].rows for k in index] for header in headers]
        taps = self._taps(unit, rows_SK, self._compressors[unit])
        tapped = taps and all(h.uses[k].tapped for h in headers for k in index)
        taps = self._taps(unit, rows_SK, self._compressors.next_of(unit))
        outside = unit in self._has_autograd_grad
        if self._compressors.travels_dense(unit):
            return _Decision(Route.DENSE, False, taps, 0, Reason(why=Why.OWING))
        route = self._compressors[unit].route(unit, rows_SK, tapped=tapped)
        if unit.block is not None:  # its rows are bytes
            nbytes = max(map(sum, rows_SK))
            reason = why_block(nbytes, tapped=tapped, tap_next=taps, outside=outside)
            return _Decision(route, tapped, taps, nbytes if tapped else 0, reason)
        load = Load(unit, tapped)
        sizes = (self._size(load, rows_K, site) for site, rows_K in enumerate(rows_SK))
        size = max(sizes) if route != Route.DENSE else 0
        reason = why_unit(load, route, self._compressors[unit], tap_next=taps, outside=outside)
        return _Decision(route, tapped, taps, size, reason)

    def pays(self, unit: Unit, rows_K: Sequence[int]) -> bool:
        """True if a unit would be tapped if every site had these numbers of rows per slot (K)."""
        return self._taps(unit, [rows_K] * self._cost.sites, self._compressors[unit])

    def _taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]], compressor: Compressor) -> bool:
        if not unit.sources or unit in self._has_autograd_grad:
            return False
        return compressor.taps(unit, rows_SK)

    def _size(self, load: Load, rows_K: Sequence[int], site: int) -> int:
        compressor = self._compressors[load.unit]
        rows = rows_K if load.tapped else [matrix.outputs for matrix in load.slots]
        pairs = [(slot, n) for slot, n in zip(load.slots, rows, strict=True) if n]
        counts = [(slot, compressor.sent_rows(slot, n, site)) for slot, n in pairs]
        vectors = 4 * sum(self._model.params[name].numel() for name in load.vectors)
        return vectors + sum(compressor.payload_bytes(*pair) for pair in counts)
