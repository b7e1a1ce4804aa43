"""What methods of formed gradients have in common, by one that sends the first half of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import outergrad as og
from asking import inheritance
from outergrad.core.coding import Field
from outergrad.core.payload import Entries, Form
from outergrad.core.types import Part, Route
from outergrad.methods.formed import FormedCompressor
from outergrad.session.inspect import inspect


@dataclass(frozen=True)
class HalfForm(Form):
    """The first entries; their places follow from their number."""

    def fields(self, slot, count, dtype, bias, codecs):
        return [Field((count,), dtype)]

    def read(self, tensors, slot, count):
        shape = slot.groups, slot.outputs, slot.inputs
        return Entries(tensors[0], torch.arange(count), shape)


class HalfCompressor(FormedCompressor):
    form = HalfForm()

    def sent_rows(self, slot, rows, site):
        return slot.numel // 2 if rows else 0

    def encode(self, slot, due_GOI, count):
        return [due_GOI.flatten()[:count]]

    def reveals(self, unit):
        return "half"


@dataclass(frozen=True)
class Half:
    def compressor(self):
        return HalfCompressor()


@pytest.fixture
def half():
    found = inspect(nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)), Half(), og.RULES)
    ((compressor, units),) = found.compressors.items()
    (matrix,) = units[0].matrices
    return compressor, units, matrix


def step(compressor, slot, gradient, *, applied=True):
    ((values,),) = compressor.compress([Part(slot, gradient, compressor.sent_rows(slot, 4, 0))])
    compressor.commit(applied=applied)
    return values


def test_what_is_not_sent_is_added_to_the_next_gradient(half):
    compressor, _, slot = half
    gradient = torch.arange(24.0).view(1, 4, 6)
    assert step(compressor, slot, gradient).tolist() == list(range(12))
    assert compressor.residual(slot).flatten().tolist() == [0.0] * 12 + list(range(12, 24))
    assert step(compressor, slot, gradient).tolist() == list(range(12))
    assert compressor.residual(slot).flatten().tolist()[12:] == [2.0 * n for n in range(12, 24)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_remembered(half, bad):
    compressor, _, slot = half
    step(compressor, slot, torch.ones(1, 4, 6))
    before = compressor.residual(slot).clone()
    assert not step(compressor, slot, torch.full((1, 4, 6), bad)).isfinite().any()
    assert compressor.residual(slot).equal(before)


def test_the_gradient_stays_what_it_was(half):
    compressor, _, slot = half
    gradient = torch.ones(1, 4, 6)
    for _ in range(2):
        step(compressor, slot, gradient)
    assert gradient.equal(torch.ones(1, 4, 6))


def test_it_travels_where_that_is_fewer_bytes(half):
    """64 bytes, with the bias, to every other site; of all 112 a ring sends 224 / S for each."""
    compressor, units, _ = half
    routes = [compressor.route(units[0], [[3]] * sites, tapped=False) for sites in (1, 2, 3, 4)]
    assert routes == [Route.DENSE, Route.GATHER, Route.GATHER, Route.DENSE]
    rows = [compressor.break_even(units[0], sites) for sites in (1, 2, 3, 4)]
    assert rows == [0.0, math.inf, math.inf, 0.0]
    compressor.forced = True
    assert compressor.route(units[0], [[3]] * 4, tapped=False) == Route.GATHER


def test_a_site_that_takes_over_from_two_owes_what_both_did(half):
    compressor, units, slot = half
    states = []
    for value in (1.0, 10.0):
        other = HalfCompressor()
        step(other, slot, torch.full((1, 4, 6), value))
        states.append(other.state())
    given = inheritance(states[0], units)
    compressor.load(type(given)(given.place_of, states[0], states[0], states, 0.5, [0]))
    assert compressor.residual(slot).flatten().tolist() == [0.0] * 12 + [5.5] * 12
