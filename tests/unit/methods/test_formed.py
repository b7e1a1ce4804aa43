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
from outergrad.methods.formed import FormedExchange
from outergrad.session.inspect import inspect


@dataclass(frozen=True)
class HalfForm(Form):
    """The first entries; their places follow from their number."""

    def fields(self, slot, count, dtype, bias, codecs):
        return [Field((count,), dtype)]

    def read(self, tensors, slot, count):
        shape = slot.groups, slot.outputs, slot.inputs
        return Entries(tensors[0], torch.arange(count), shape)


class HalfExchange(FormedExchange):
    form = HalfForm()

    def sent_rows(self, slot, rows, site):
        return slot.numel // 2 if rows else 0

    def encode(self, slot, due_GOI, count):
        return [due_GOI.flatten()[:count]]

    def reveals(self, unit):
        return "half"


@dataclass(frozen=True)
class Half:
    def exchange(self):
        return HalfExchange()


@pytest.fixture
def half():
    found = inspect(nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)), Half(), og.RULES)
    ((exchange, units),) = found.exchanges.items()
    (matrix,) = units[0].matrices
    return exchange, units, matrix


def step(exchange, slot, gradient, *, applied=True):
    ((values,),) = exchange.compress([Part(slot, gradient, exchange.sent_rows(slot, 4, 0))])
    exchange.commit(applied=applied)
    return values


def test_what_is_not_sent_is_added_to_the_next_gradient(half):
    exchange, _, slot = half
    gradient = torch.arange(24.0).view(1, 4, 6)
    assert step(exchange, slot, gradient).tolist() == list(range(12))
    assert exchange.residual(slot).flatten().tolist() == [0.0] * 12 + list(range(12, 24))
    assert step(exchange, slot, gradient).tolist() == list(range(12))
    assert exchange.residual(slot).flatten().tolist()[12:] == [2.0 * n for n in range(12, 24)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_remembered(half, bad):
    exchange, _, slot = half
    step(exchange, slot, torch.ones(1, 4, 6))
    before = exchange.residual(slot).clone()
    assert not step(exchange, slot, torch.full((1, 4, 6), bad)).isfinite().any()
    assert exchange.residual(slot).equal(before)


def test_the_gradient_stays_what_it_was(half):
    exchange, _, slot = half
    gradient = torch.ones(1, 4, 6)
    for _ in range(2):
        step(exchange, slot, gradient)
    assert gradient.equal(torch.ones(1, 4, 6))


def test_it_travels_where_that_is_fewer_bytes(half):
    """64 bytes, with the bias, to every other site; of all 112 a ring sends 224 / S for each."""
    exchange, units, _ = half
    routes = [exchange.route(units[0], [[3]] * sites, tapped=False) for sites in (1, 2, 3, 4)]
    assert routes == [Route.DENSE, Route.GATHER, Route.GATHER, Route.DENSE]
    rows = [exchange.break_even(units[0], sites) for sites in (1, 2, 3, 4)]
    assert rows == [0.0, math.inf, math.inf, 0.0]
    exchange.forced = True
    assert exchange.route(units[0], [[3]] * 4, tapped=False) == Route.GATHER


def test_a_site_that_takes_over_from_two_owes_what_both_did(half):
    exchange, units, slot = half
    states = []
    for value in (1.0, 10.0):
        other = HalfExchange()
        step(other, slot, torch.full((1, 4, 6), value))
        states.append(other.state())
    given = inheritance(states[0], units)
    exchange.load(type(given)(given.place_of, states[0], states[0], states, 0.5, [0]))
    assert exchange.residual(slot).flatten().tolist() == [0.0] * 12 + [5.5] * 12
