"""Vectors through codecs: how many bytes, that nothing is lost, and that training goes on alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import relative_error
from outergrad.linalg.outer import formed
from outergrad.wire import Int4
from ranks import run_on_lasting_groups

WIDTH = 32


class Model(nn.Module):
    """Biases of layers, parts of one, of groups and of two layers, norms, and one by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.linear, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied.bias = self.linear.bias
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).unflatten(1, (2, 4)).sum(1)
        x = self.norm(self.attention(x, x, x)[0])
        return self.tied(torch.tanh(self.linear(x))) * self.scale


torch.manual_seed(0)
START = Model()
with torch.no_grad():
    START.attention.in_proj_bias.normal_()
DATA = [[torch.randn(rows, 4, WIDTH) for rows in (2, 9, 1)] for _ in range(3)]
"""Batches per site."""
METHODS: dict[str, Any] = {
    "gather": og.RankDAD(rank=2, vectors=Int4()),
    "all in four bits": og.RankDAD(rank=2, wire=Int4(), vectors=Int4(), error_feedback="dense"),
    "two ways": og.RankDAD(rank=2, reduce="two_way", vectors=Int4()),
    "full rank": og.RankDAD(rank=WIDTH, vectors=Int4()),
}
ALWAYS = ("norm.weight", "norm.bias", "scale")
"""Vectors that no layer's way has a say in."""
by_methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
by_sites = pytest.mark.parametrize("sites", [2, 3])


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def owed(session: Any, sites: int) -> dict[str, Tensor]:
    whole = {name: torch.zeros_like(p).double() for name, p in START.named_parameters()}
    for compressor, units in session._exchange.compressors.items():
        places = {m.place: m for unit in units for m in (*unit.slots, *unit.matrices)}
        for slot in places.values():
            if (residual := compressor.residual(slot)) is not None:
                start, stop = slot.weight_rows or (0, len(whole[slot.weight]))
                part = whole[slot.weight][start:stop]
                part += formed(residual).reshape(part.shape) / sites
    return whole


@by_methods
@by_sites
def test_what_was_applied_and_what_is_owed_are_all_there_was(method, sites):
    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, method, group=group)
        return [step(model, x) for x in DATA[rank]], owed(session, sites)

    results = run_on_lasting_groups(sites, body)
    reference = copy.deepcopy(START).double()
    due = [step(reference, x.double()) for data in DATA[:sites] for x in data]
    for name in dict(START.named_parameters()):
        applied = [gradients[name].double() for gradients in results[0][0]]
        for one, other in zip(results[0][0], results[-1][0], strict=True):
            assert one[name].equal(other[name])
        whole = sum(applied) + sum(part[name] for _, part in results)
        expected = sum(g[name] for g in due) / sites
        assert relative_error(whole, expected) < 1e-5, name
        if name in ALWAYS:
            assert relative_error(sum(applied), expected) > 1e-4, name


@by_methods
def test_training_goes_on_to_the_bit(method):
    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, method, group=group)
        whole = [step(model, x) for x in DATA[rank]]
        session.detach()
        session = og.distribute(model, method, group=group)
        begun = [step(model, x) for x in DATA[rank][:2]]
        state = session.state_dict()
        session.detach()
        session = og.distribute(model, method, group=group)
        session.load_state_dict(state)
        return whole, [*begun, step(model, DATA[rank][2])]

    for whole, parts in run_on_lasting_groups(2, body):
        for one, other in zip(whole, parts, strict=True):
            assert all(one[name].equal(other[name]) for name in one)


@by_methods
def test_what_vectors_cost_and_how_they_are_listed(method):
    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, method, group=group)
        for x in DATA[rank]:
            step(model, x)
        return session.coverage(), session.stats().layers

    coverage, layers = run_on_lasting_groups(2, body)[0]
    for name in ALWAYS:
        assert layers[name].sent_bytes <= 4 * 16  # of 128 in float32: four tensors, aligned
    lines = {line.parameter: line for line in coverage}
    for name, line in lines.items():
        by_itself, weight = name in ALWAYS, name.replace("bias", "weight")
        if by_itself or (len(line.shape) == 1 and lines[weight].travels == "low rank"):
            assert line.travels == "compressed"
            assert "Int4" in line.why


def test_sums_take_none():
    with pytest.raises(ValueError, match="vectors="):
        og.RankDAD(reduce="all_reduce", vectors=Int4())
    with pytest.raises(ValueError, match="vectors='int4'; use codecs"):
        og.RankDAD(vectors="int4")  # type: ignore[arg-type]
