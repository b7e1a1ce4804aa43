"""Chains: activations of every layer and one delta."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import outergrad as og
from cases import relative_error
from covering import covering
from ranks import run_on_lasting_groups
from replaying import assert_all_have, check, loss, pooled, rows, train_seeded

ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "leaky": nn.LeakyReLU(0.2),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.3, 0.7),
    "hardsigmoid": nn.Hardsigmoid(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "softplus": nn.Softplus(2.0),
    "elu": nn.ELU(0.7),
    "celu": nn.CELU(0.8),
    "selu": nn.SELU(),
    "logsigmoid": nn.LogSigmoid(),
    "softsign": nn.Softsign(),
    "identity": nn.Identity(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "prelu": nn.PReLU(),
    "layer norm": nn.LayerNorm(12),
    "norm and function": nn.Sequential(nn.LayerNorm(12), nn.Tanh()),
    "two functions": nn.Sequential(nn.Tanh(), nn.ReLU()),
    "none": nn.Sequential(),
}


def deep(activation, layers=6, width=12):
    parts = [nn.Linear(10, width)]
    for _ in range(layers - 2):
        parts += [copy.deepcopy(activation), nn.Linear(width, width)]
    return nn.Sequential(*parts, copy.deepcopy(activation), nn.Linear(width, 7), nn.Tanh())


@pytest.mark.parametrize(
    ("name", "sites", "inputs"),
    covering(ACTIVATIONS.keys(), [2, 3], ["canonical", "raw"], quick=4, every=2),
)
def test_a_chain_is_exact_with_every_function_between(name, sites, inputs):
    torch.manual_seed(1)
    model = deep(ACTIVATIONS[name])
    whole = [n for n, _ in model.named_parameters()]
    inside = [n for n in whole if not n.startswith(("0.", "1."))]
    travels = inside if inputs == "canonical" else whole
    check(model, og.EDAD(always=True, inputs=inputs), rows(sites, 10), travels)


CONVOLUTIONS = {
    "1d": lambda: nn.Sequential(
        nn.Conv1d(3, 6, 3), nn.ReLU(), nn.Conv1d(6, 4, 2, stride=2), nn.Tanh(), nn.Conv1d(4, 5, 3)
    ),
    "2d, pooled, flattened": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(6, 8, 3, groups=2, bias=False), nn.GroupNorm(2, 8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 5, 3, dilation=2, padding=2), nn.Sigmoid(), nn.Flatten()),
        nn.Sequential(nn.Linear(45, 9), nn.ELU(), nn.Linear(9, 4)),
    ),
    "3d": lambda: nn.Sequential(
        *(nn.Conv3d(3, 4, 2), nn.ReLU(), nn.Conv3d(4, 3, 2), nn.Softplus(), nn.Conv3d(3, 3, 1))
    ),
}


@pytest.mark.parametrize("inputs", ["canonical", "raw"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_chain_of_convolutions_is_exact(name, inputs):
    torch.manual_seed(1)
    model = CONVOLUTIONS[name]()
    sizes = {"1d": (3, 16), "3d": (3, 5, 5, 5)}.get(name, (3, 10, 10))
    inside = [n for n, p in model.named_parameters() if n not in ("0.weight", "0.bias")][2:]
    check(model, og.EDAD(always=True, inputs=inputs), rows(2, *sizes), inside)


def test_dropout_in_a_chain_is_drawn_again(monkeypatch):
    torch.manual_seed(1)
    parts = [nn.Linear(10, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 11), nn.Dropout(0.3)]
    model = nn.Sequential(*parts, nn.Tanh(), nn.Linear(11, 5))
    inputs = rows(2, 10)
    found = train_seeded(monkeypatch, model, og.EDAD(always=True, inputs="raw"), inputs)
    whole = copy.deepcopy(model).double()
    for rank, (x,) in enumerate(inputs):
        y = x.double()
        for k, part in enumerate(whole):
            if k in (1, 4):  # what follows a layer is drawn from one seed
                torch.manual_seed(100 * rank + (k == 4))
            y = part(y)
        (loss(y) / 2).backward()
    assert_all_have(found, whole)


def test_a_hook_on_a_layer_of_a_chain_is_called():
    def body(rank, group):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        session = og.distribute(model, og.EDAD(always=True), group=group)
        seen = []
        model[2].register_forward_hook(lambda *_: seen.append(1))
        for _ in range(2):
            loss(model(torch.randn(3, 6))).backward()
        session.detach()
        return len(seen)

    assert run_on_lasting_groups(2, body) == [2, 2]


def test_a_sequential_that_is_iterated_travels_otherwise():
    """Its chain never runs: right all the same, and together with the rest from the second step."""
    torch.manual_seed(1)
    model, inputs = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), rows(2, 6)

    def forward(replica, x):
        for layer in replica:
            x = layer(x)
        return x

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.EDAD(always=True), group=group)
        for _ in range(3):
            replica.zero_grad()
            loss(forward(replica, inputs[rank][0])).backward()
        session.detach()
        lines = {line.parameter: line for line in session.coverage()}
        return {n: p.grad for n, p in replica.named_parameters()}, lines["2.weight"]

    expected = pooled(model, inputs)
    for gradients, line in run_on_lasting_groups(2, body):
        assert line.travels == "dense"
        assert line.why == "a parameter is also used outside the block"
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected[name]) < 5e-6, name


def test_passes_without_sync_under_autocast_add_to_gradients_of_their_own_dtype():
    """What is computed again there is in bfloat16, the parameters are in float32."""
    torch.manual_seed(1)
    original, xs = deep(nn.ReLU()), rows(2, 10)

    def train(model, x, no_sync):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with no_sync():
                loss(model(*x)).backward()
            loss(model(*x)).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    def body(rank, group):
        model = copy.deepcopy(original)
        session = og.distribute(model, og.EDAD(always=True), group=group)
        found = train(model, xs[rank], session.no_sync)
        session.detach()
        return found

    alone = [train(copy.deepcopy(original), x, nullcontext) for x in xs]
    for found in run_on_lasting_groups(2, body):
        for name, gradient in found.items():
            mean = sum(gradients[name].double() for gradients in alone) / 2
            assert gradient.dtype == torch.float32
            assert relative_error(gradient, mean) < 0.03, name
