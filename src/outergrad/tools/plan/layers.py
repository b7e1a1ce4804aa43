"""Layers of a model, and the bytes that each sends by each method."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

import outergrad as og
from outergrad.core.cost import CostModel
from outergrad.core.protocols import Method
from outergrad.core.transport import Capability
from outergrad.core.types import Slot
from outergrad.record.stats import LayerStats
from outergrad.session.inspect import FoundLayer, Inspection, inspect

_MARKS = {
    "factors": "f",
    "low rank": "l",
    "sparse": "s",
    "compressed": "c",
    "replayed": "r",
    "dense": "",
}


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a layer by one method.

    Attributes:
        sent_bytes: Payload per step and site; None if it is sent as part of a block.
        marks: Ways in which it is sent: f for factors, l for low rank, s for sparse, c for
            compressed otherwise, r for replayed, nothing for dense.
    """

    sent_bytes: int | None
    marks: str


@dataclass(frozen=True)
class LayerPlan:
    """Line of the table of layers.

    Attributes:
        name: Full name of the module, of a block or of a parameter.
        shape: Shape of its largest weight.
        rows: N in a step on one site; None where that has no meaning.
        break_even: Rows per site from which on exact factors are no fewer bytes than dense: the
            smallest and the largest of its weights; None where there are no factors.
        sent: Bytes by method.
    """

    name: str
    shape: tuple[int, ...]
    rows: int | None
    break_even: tuple[float, float] | None
    sent: dict[str, LayerBytes]


class Layers:
    """Maps parameters to layers, and the statistics of either to lines of the table.

    Args:
        model: The model, not distributed.
        cost: Cost model of the collectives, for the break-even.
        run: Runs a forward pass.
    """

    def __init__(self, model: nn.Module, cost: CostModel, run: Callable[[], Any]) -> None:
        self._model, self._cost = model, cost
        self._inspection = inspect(model, og.DAD(), og.RULES)
        for compressor, _ in self._inspection.compressors.items():
            compressor.settle(cost, frozenset(Capability))
        self._layer_of, self._names = _names(model, self._inspection)
        self._rows = _rows(self._inspection, run)

    def plans(
        self, methods: Mapping[str, Method], stats: Mapping[str, Mapping[str, LayerStats]]
    ) -> list[LayerPlan]:
        """Returns the table's lines: layers in model order, each block after its last layer.

        Args:
            methods: Methods by name.
            stats: Statistics of each method's session, by layer.
        """
        order = list(dict.fromkeys(self._layer_of.values()))
        cells: defaultdict[str, dict[str, LayerBytes]] = defaultdict(dict)
        for method, booked in stats.items():
            lines = self._block_lines(methods[method])
            for label, layer in booked.items():
                name, inside = lines.get(label) or (self._name(label), set[str]())
                if name not in order:
                    order.insert(1 + max(map(order.index, inside), default=len(order)), name)
                cells[name][method] = _sum(cells[name].get(method), layer)
                for other in inside - {name}:
                    cells[other][method] = LayerBytes(None, "r")
        return [self._plan(name, cells[name]) for name in order]

    def _block_lines(self, method: Method) -> dict[str, tuple[str, set[str]]]:
        """Line and layers of each block; the line of a block of one layer is that layer's."""
        found = [b.block for b in inspect(self._model, method, og.RULES).blocks]
        inside = {block.name: {self._layer_of[p] for p in block.params} for block in found}
        return {n: (n if len(i) > 1 else next(iter(i)), i) for n, i in inside.items()}

    def _name(self, label: str) -> str:
        return self._names.get(label) or self._layer_of.get(label) or label

    def _plan(self, name: str, sent: dict[str, LayerBytes]) -> LayerPlan:
        params = [p for p, layer in self._layer_of.items() if layer == name]
        shapes = [tuple(self._inspection.model.params[p].shape) for p in params]
        units = [u for u in self._inspection.model.units if set(u.params) & set(params)]
        compressors = self._inspection.compressors
        limits = [compressors[unit].break_even(unit, self._cost.sites) for unit in units]
        rows = [self._rows[slot] for unit in units for slot in unit.slots]
        largest = max(shapes, key=prod, default=())
        limit = (min(limits), max(limits)) if limits else None
        return LayerPlan(name, largest, max(rows, default=None), limit, sent)


def _sum(before: LayerBytes | None, layer: LayerStats) -> LayerBytes:
    marks = "" if before is None else before.marks
    mark = _MARKS[layer.travels]
    nbytes = 0 if before is None or before.sent_bytes is None else before.sent_bytes
    return LayerBytes(nbytes + layer.sent_bytes, marks if mark in marks else marks + mark)


def _names(model: nn.Module, inspection: Inspection) -> tuple[dict[str, str], dict[str, str]]:
    """Layer of each trained parameter, and line of each layer with a rule.

    Layers that share weights have one line.
    """
    layer_of: dict[str, str] = {}
    names: dict[str, str] = {}
    for unit in inspection.model.units:
        labels = [slot.layer or slot.weight for slot in unit.slots]
        first = next((names[label] for label in labels if label in names), labels[0])
        names.update(dict.fromkeys(labels, first))
        layer_of.update(dict.fromkeys(unit.params, first))
    for name in inspection.model.params:
        layer_of.setdefault(name, name.rpartition(".")[0] or name)
    return {name: layer_of[name] for name in inspection.model.params}, names


def _rows(inspection: Inspection, run: Callable[[], Any]) -> Counter[Slot]:
    """Rows N of each slot in a forward pass."""
    rows: Counter[Slot] = Counter()
    handles = [_counted(layer, rows) for layer in inspection.layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _counted(layer: FoundLayer, rows: Counter[Slot]) -> Any:
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for slot, n in zip(layer.slots, layer.rule.rows(module, args, kwargs), strict=True):
            rows[slot] += n

    return layer.module.register_forward_pre_hook(count, with_kwargs=True)
