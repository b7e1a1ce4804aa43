"""What a compressor is asked without a session: gradients, payloads, what it remembers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import outergrad as og
from outergrad.core.compressor import Compressor
from outergrad.core.types import Factors, Inheritance, Link, Part, Route, Slot, Unit, place_name
from outergrad.messages.wire import Piece
from outergrad.session.inspect import inspect

SITES, ROWS = 3, 5
_LINK = Link(delay_s=0.01, bytes_per_s=1e7)


def network() -> nn.Module:
    """Matrices of several shapes, vectors, a convolution and a weight without a rule."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 20), nn.LayerNorm(20), Scaled(20)
    )


class Scaled(nn.Module):
    """A matrix of its own, of which no rule knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(width, 14) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


class Asked(NamedTuple):
    """A slot whose gradient is compressed, and how."""

    unit: Unit
    slot: Slot
    route: Route
    tapped: bool


def asked(compressor: Compressor, units: Sequence[Unit], sites: int = SITES) -> Iterator[Asked]:
    for unit in units:
        rows_SK = [[ROWS] * len(unit.slots)] * sites
        tapped = bool(unit.slots) and compressor.taps(unit, rows_SK)
        route = compressor.route(unit, rows_SK, tapped=tapped)
        if route != Route.DENSE:
            slots = unit.slots if tapped else unit.matrices
            yield from (Asked(unit, slot, route, tapped) for slot in slots)


def gradient_of(one: Asked, seed: int) -> Factors | Tensor:
    generator, slot = torch.Generator().manual_seed(seed), one.slot
    if not one.tapped:
        return torch.randn(slot.groups, slot.outputs, slot.inputs, generator=generator)
    d_GRO = torch.randn(slot.groups, ROWS, slot.outputs, generator=generator)
    if slot.lookup:
        return Factors(d_GRO, torch.arange(ROWS))
    return Factors(d_GRO, torch.randn(slot.groups, ROWS, slot.inputs, generator=generator))


def compressed(compressor: Compressor, one: Asked, seed: int) -> list[Tensor | None]:
    """What is sent of it, or this site's part of the first sum."""
    gradient = gradient_of(one, seed)
    if one.route == Route.REDUCE:
        assert compressor.sketches is not None
        return [compressor.sketches.begin(one.slot, gradient)]
    return list(*compressor.compress([Part(one.slot, gradient, count(compressor, one))]))


def count(compressor: Compressor, one: Asked) -> int:
    return compressor.sent_rows(one.slot, ROWS if one.tapped else one.slot.outputs, 0)


def piece(compressor: Compressor, one: Asked) -> Piece:
    bias = torch.float32 if compressor.sends_bias(one.slot) else None
    own = torch.float32, bias, compressor.codecs(one.slot), compressor.form
    return Piece(one.slot, count(compressor, one), *own)


def exchange_of(method: Any, model: nn.Module) -> tuple[Compressor, Sequence[Unit]]:
    found = inspect(model, method, og.RULES)
    ((compressor, units),) = found.compressors.items()
    if compressor.wants_link(SITES):
        compressor.settle_reduce(units, SITES, _LINK)
    return compressor, units


def inheritance(state: dict[str, Any], units: Sequence[Unit]) -> Inheritance:
    slots = [slot for unit in units for slot in (*unit.slots, *unit.matrices)]
    places = {place_name(slot.place): slot.place for slot in slots}
    state = copy.deepcopy(state)
    return Inheritance(places, state, state, [state], 1.0, list(range(SITES)))


def flat(value: Any) -> Any:
    """Something that can be compared to the bit."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value
