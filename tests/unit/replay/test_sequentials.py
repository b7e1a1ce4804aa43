"""Chains in an `nn.Sequential`: it computes what it computes without them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from ranks import run_on_lasting_groups
from replaying import check, loss, rows


def linears(count, width=6):
    return [nn.Linear(width, width) for _ in range(count)]


def nested():
    """Chains before, in and behind a nested one."""
    inside = nn.Sequential(*linears(3), nn.Tanh())
    return nn.Sequential(*linears(3), nn.Tanh(), inside, *linears(3))


def shared_functions():
    """One module for all activations: it stands in several places."""
    act = nn.ReLU()
    return nn.Sequential(*(part for layer in linears(5) for part in (layer, act)))


MODELS = {"nested": nested, "shared functions": shared_functions}


@pytest.mark.parametrize("name", MODELS)
def test_chains_are_exact_and_compute_the_same(name):
    torch.manual_seed(1)
    model, inputs = MODELS[name](), rows(2, 6)
    inside = [n for n, _ in model.named_parameters() if not n.startswith("0.")]
    check(model, og.EDAD(always=True), inputs, inside)

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.EDAD(always=True), group=group)
        y = replica(*inputs[rank])
        session.detach()
        return y

    for (x,), y in zip(inputs, run_on_lasting_groups(2, body), strict=True):
        assert y.equal(model(x))


def test_a_hook_on_a_nested_sequential_is_called():
    def body(rank, group):
        model = nested()
        session = og.distribute(model, og.EDAD(always=True), group=group)
        seen = []
        model[4].register_forward_hook(lambda *_: seen.append(1))
        for _ in range(2):
            loss(model(torch.randn(3, 6))).backward()
        session.detach()
        return len(seen)

    assert run_on_lasting_groups(2, body) == [2, 2]


def test_a_sequential_that_is_changed_later_computes_what_it_holds():
    torch.manual_seed(1)
    original, inputs = nested(), rows(2, 6)
    changed = copy.deepcopy(original)
    changed[3] = nn.Sigmoid()

    def body(rank, group):
        model = copy.deepcopy(original)
        session = og.distribute(model, og.EDAD(always=True), group=group)
        model[3] = nn.Sigmoid()
        y = model(*inputs[rank])
        loss(y).backward()
        session.detach()
        return y, {name: p.grad for name, p in model.named_parameters()}

    results = run_on_lasting_groups(2, body)
    for (x,), (y, _) in zip(inputs, results, strict=True):
        expected = changed(x)
        (loss(expected) / 2).backward()
        assert y.equal(expected)
    for name, p in changed.named_parameters():
        for _, gradients in results:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-7)


def test_a_block_in_a_sequential_with_chains_is_replayed():
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model = nn.Sequential(nn.Linear(6, 6), block, nn.Tanh(), *linears(3))
    method = og.EDAD(blocks=["1"], always=True)
    for _, session in check(model, method, rows(2, 6), ["1.0.weight", "5.weight"]):
        assert {"1", "4 ... 5"} <= set(session.stats().layers)
        assert all(layer.sent_bytes for layer in session.stats().layers.values())


def test_chains_of_two_methods_share_a_sequential():
    torch.manual_seed(1)
    model = nn.Sequential(*linears(8))
    smaller = og.EDAD(always=True, bucket_bytes=1 << 10)
    method = og.PerLayer({"[0-3].*": og.EDAD(always=True), "*": smaller})
    for _, session in check(model, method, rows(2, 6), ["1.weight", "7.weight"]):
        assert set(session.stats().layers) == {"0.weight", "1 ... 3", "4.weight", "5 ... 7"}

    def body(rank, group):
        replica = copy.deepcopy(model)
        og.distribute(replica, method, group=group).detach()
        return [type(m) for m in replica.modules()]

    assert run_on_lasting_groups(2, body) == [[type(m) for m in model.modules()]] * 2


def between(part):
    """Without biases: a softmax over rows would leave theirs no gradient."""
    layers = (nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    return nn.Sequential(*layers, part, nn.Linear(6, 5))


def flattened():
    return between(nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (4, 6))))


def unbatched():
    parts = (nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2))
    return nn.Sequential(*parts, nn.Sigmoid(), nn.Conv2d(4, 2, 3))


MIXING = {
    "softmax over rows": (lambda: between(nn.Softmax(dim=0)), (4, 6)),
    "softmax over rows, from behind": (lambda: between(nn.LogSoftmax(dim=-2)), (4, 6)),
    "norm over rows": (lambda: between(nn.LayerNorm([4, 6])), (4, 6)),
    "rows flattened": (
        lambda: between(nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (4, 6)))),
        (4, 6),
    ),
    "images without a batch": (unbatched, (3, 9, 9)),
    "vectors": (lambda: between(nn.GELU()), (6,)),
}


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("name", MIXING)
def test_rows_of_sites_are_not_mixed(name, sites):
    """What looks across a batch looks across that of its own site."""
    build, shape = MIXING[name]
    torch.manual_seed(1)
    check(
        build(), og.EDAD(always=True, inputs="raw"), [(torch.randn(shape),) for _ in range(sites)]
    )
