"""Sketches of the mean gradient: what comes out, what is owed, and how little travels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from covering import covering
from ranks import run_on_lasting_groups

pytestmark = pytest.mark.usefixtures("large_matrices")

METHODS = {
    "factored": og.RankDAD(rank=4, reduce="all_reduce"),
    "dense": og.RankDAD(rank=4, reduce="all_reduce", error_feedback="dense"),
    "nothing kept": og.RankDAD(rank=4, reduce="all_reduce", error_feedback=None),
    "bf16": og.RankDAD(rank=4, reduce="all_reduce", wire=og.wire.BF16()),
    "tolerance": og.RankDAD(rank=4, reduce="all_reduce", tolerance=0.2),
    "PowerSGD": og.PowerSGD(rank=4, min_ratio=1),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 50), nn.LayerNorm(50), nn.Tanh(), nn.Linear(50, 40))


def inputs(rank: int, step: int, rows: int = 30) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 60, generator=generator) * torch.arange(1, 61) ** -0.8


def backward(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mean_gradient(batches: list[Tensor], original: nn.Module) -> dict[str, Tensor]:
    model = copy.deepcopy(original).double()
    sites = [backward(model, x.double()) for x in batches]
    return {name: sum(g[name] for g in sites) / len(sites) for name in sites[0]}


def best_error(gradient: Tensor, rank: int) -> float:
    return torch.linalg.svdvals(gradient)[rank:].norm().item()


def train(method, sites: int, steps: int, batch=inputs, model=network):
    """Per site, the gradients of every step and the bytes of the last."""
    original = model()

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group)
        found = [backward(replica, batch(rank, step)) for step in range(steps)]
        return found, session.stats().sent_bytes

    return run_on_lasting_groups(sites, body)


@pytest.mark.parametrize(("method", "sites"), covering(METHODS, [2, 3, 4], quick=3))
def test_all_sites_have_the_same_and_vectors_are_exact(method, sites):
    results = train(method, sites, 3)
    for step in range(3):
        exact = mean_gradient([inputs(r, step) for r in range(sites)], network())
        for name, gradient in results[0][0][step].items():
            assert all(gradient.equal(result[0][step][name]) for result in results), name
            if gradient.dim() == 1:
                assert (gradient - exact[name]).norm() < 5e-6 * exact[name].norm() + 1e-9, name


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("rows", [30, 400], ids=["from factors", "formed"])
@pytest.mark.parametrize("feedback", [None, "factored", "dense"])
def test_a_gradient_of_the_rank_is_reproduced(rank, rows, feedback):
    """The mean over three sites has the rank, as their rows lie in the same few directions."""
    torch.manual_seed(1)
    directions = torch.randn(rank, 60)
    xs = [torch.randn(rows, rank) @ directions for _ in range(3)]
    method = og.RankDAD(rank=rank, reduce="all_reduce", error_feedback=feedback)
    layer = nn.Linear(60, 50)
    exact = mean_gradient(xs, layer)["weight"]
    for found, _ in train(method, 3, 3, lambda r, _: xs[r], lambda: layer):
        for gradients in found:
            error = (gradients["weight"] - exact).norm() / exact.norm()
            assert error < 1e-5


def test_on_one_batch_the_error_becomes_the_best_of_the_rank():
    """Each step is an iteration from where the last one ended."""
    method = og.RankDAD(rank=4, reduce="all_reduce", error_feedback=None)
    found = train(method, 2, 8, lambda rank, step: inputs(rank, 0))[0][0]
    exact = mean_gradient([inputs(r, 0) for r in range(2)], network())
    for name in ("0.weight", "3.weight"):
        errors = [(g[name].double() - exact[name]).norm().item() for g in found]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 1.05 * best_error(exact[name], 4)


def test_owed_and_applied_are_the_whole():
    """Gradients, once; then nothing but zero rows: the memory pays all its debts."""

    def batch(rank, step):
        return inputs(rank, 0) if step == 0 else torch.zeros(30, 60)

    original = nn.Linear(60, 50, bias=False)
    found = train(METHODS["dense"], 2, 40, batch, lambda: original)[0][0]
    exact = mean_gradient([inputs(r, 0) for r in range(2)], original)["weight"]
    applied = sum(step["weight"].double() for step in found)
    assert (applied - exact).norm() < 1e-4 * exact.norm()


def test_bytes_do_not_grow_with_the_sites():
    header = 512  # goes to every other site, and stays while a group has several sessions
    sent = {s: train(METHODS["factored"], s, 3)[0][1] - (s - 1) * header for s in (2, 4)}
    assert sent[4] < 1.51 * sent[2], "2 (S - 1) / S: from 1 to 1.5"


def test_the_rank_follows_the_tolerance():
    sent = {}
    for tolerance in (0.5, 0.05):
        method = og.RankDAD(rank=16, reduce="all_reduce", tolerance=tolerance, error_feedback=None)
        found, sent[tolerance] = train(method, 2, 12, lambda rank, step: inputs(rank, 0))[0]
        exact = mean_gradient([inputs(r, 0) for r in range(2)], network())["0.weight"]
        assert (found[-1]["0.weight"] - exact).norm() < tolerance * exact.norm()
    assert sent[0.5] < 0.5 * sent[0.05]


def test_a_site_without_rows_takes_part():
    def batch(rank, step):
        return inputs(rank, step, rows=0 if rank == 1 else 30)

    def loss_sum(model, x):
        model.zero_grad()
        model(x).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    original = network()

    def body(rank, group):
        replica = copy.deepcopy(original)
        og.distribute(replica, METHODS["nothing kept"], group=group)
        return [loss_sum(replica, batch(rank, 0)) for _ in range(4)][-1]

    first, second = run_on_lasting_groups(2, body)
    exact = {n: g / 2 for n, g in loss_sum(copy.deepcopy(original), batch(0, 0)).items()}
    for name, gradient in first.items():
        assert gradient.equal(second[name])
        limit = 1.1 * best_error(exact[name], 4) if gradient.dim() == 2 else 1e-4
        assert (gradient - exact[name]).norm() <= limit + 1e-4 * exact[name].norm(), name


def test_not_a_number_is_seen_everywhere_and_forgotten():
    """A bad batch of one site shows at all of them, and spoils no later step."""

    def batch(rank, step):
        bad = rank == 1 and step == 2
        return inputs(rank, step) * (float("nan") if bad else 1.0)

    for method in METHODS.values():
        for found, _ in train(method, 2, 5, batch):
            assert not found[2]["0.weight"].isfinite().all()
            assert all(g.isfinite().all() for step in (0, 1, 3, 4) for g in found[step].values())


@pytest.mark.parametrize("name", ["gather", "all_reduce"])
def test_weights_without_a_rule_travel_at_low_rank(name):
    original = nn.Bilinear(20, 20, 40)

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, og.RankDAD(rank=2, reduce=name), group=group)
        torch.manual_seed(rank)
        for _ in range(2):
            replica.zero_grad()
            replica(*torch.randn(2, 15, 20)).square().mean().backward()
        return session.stats().sent_bytes, {t.parameter: t.travels for t in session.coverage()}

    sent, travels = run_on_lasting_groups(2, body)[0]
    assert travels["weight"] == "low rank"
    assert sent < 0.4 * 4 * sum(p.numel() for p in original.parameters())


MISTAKES = {"rank": {"rank": 0}, "wire": {"wire": og.wire.Int8()}, "min_ratio": {"min_ratio": 0}}


@pytest.mark.parametrize(("name", "settings"), MISTAKES.items(), ids=MISTAKES)
def test_a_wrong_setting_of_powersgd_is_named(name, settings):
    with pytest.raises(ValueError, match=rf"PowerSGD: {name}="):
        og.PowerSGD(**settings)
