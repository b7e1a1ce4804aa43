"""rank-dAD: what is lost, what is kept for later, and how many bytes travel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from cases import SHARED_STREAM, build
from covering import covering
from low_rank import (
    backward,
    decaying,
    error,
    expected,
    gradients_around_a_void_step,
    mean_gradients,
    model,
    total,
    train,
)
from outergrad.core.types import Route, Unit
from outergrad.linalg.compress import Solver
from ranks import run_on_lasting_groups
from seeding import seed

pytestmark = pytest.mark.usefixtures("large_matrices")

SOLVERS: tuple[Solver, ...] = ("small_core", "subspace_iteration", "power_iteration")
LINEAR = Unit(
    (og.Slot("l", "l.weight", 60, 50, bias="l.bias"),),
    ("l.weight", "l.bias"),
    60 * 51,
    (og.Slot("l", "l.weight", 60, 50),),
)


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("wire", [(), og.wire.BF16()])
def test_weights_lose_little_and_everything_else_nothing(sites, wire):
    method = og.RankDAD(rank=4, error_feedback=None, wire=wire)
    found = train(method, sites, steps=3)
    for step in range(3):
        mean = expected(sites, step)
        for name, gradient in found[0][0][step].items():
            low_rank = name in ("0.weight", "3.weight")
            assert error(gradient, mean[name]) < (0.5 if low_rank else 5e-6), name
            assert all(gradient.equal(site[0][step][name]) for site in found)


def test_bf16_halves_the_bytes():
    fp32, bf16 = (train(og.RankDAD(rank=8, wire=w), 2, 2)[0][1] for w in ((), og.wire.BF16()))
    weights_bytes = 4 * 8 * (100 + 80 + 80 + 60)
    assert fp32 - bf16 == pytest.approx(weights_bytes / 2, abs=100)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("rank", [1, 4])
def test_a_gradient_of_the_rank_is_reproduced(solver, rank):
    """Also at rank 1, and as the mean over the sites, not their sum."""
    torch.manual_seed(1)
    original = nn.Linear(50, 40)
    xs = [torch.randn(30, rank) @ torch.randn(rank, 50) for _ in range(2)]
    weight = mean_gradients(original, xs)["weight"]

    def body(index, group):
        replica = copy.deepcopy(original)
        og.distribute(replica, og.RankDAD(rank=rank, solver=solver), group=group)
        return backward(replica, xs[index])["weight"]

    for gradient in run_on_lasting_groups(2, body):
        assert error(gradient, weight) < 1e-5


LOSSY = {
    "gather": og.RankDAD(rank=1, iterations=1, error_feedback=None, reduce="gather"),
    "all_reduce": og.RankDAD(rank=1, error_feedback=None, reduce="all_reduce"),
    "powersgd": og.PowerSGD(rank=1, error_feedback=False, min_ratio=1),
}


@pytest.mark.parametrize(
    ("name", "method"), covering(sorted(set(build()) - SHARED_STREAM), LOSSY, quick=6, every=3)
)
def test_every_kind_of_layer_is_no_worse_than_without(name, method):
    """With one iteration, too, where the published code is worse than sending zeros."""
    case = build()[name]()

    def body(rank, group):
        gradients = {}
        for each in (og.Dense(), method):
            replica = copy.deepcopy(case.model)
            og.distribute(replica, each, group=group)
            seed(7)
            y = replica(*case.batches[0])
            case.loss(y[0] if isinstance(y, tuple) else y).backward()
            gradients[each] = {n: p.grad for n, p in replica.named_parameters()}
        return gradients

    for gradients in run_on_lasting_groups(2, body):
        for parameter, dense in gradients[og.Dense()].items():
            found = gradients[method][parameter]
            if dense is None:
                assert found is None
            else:
                assert (found - dense).norm() <= 1.0001 * dense.norm() + 1e-6, parameter


ROWS = {"steady": lambda rank, step: 40, "changing": lambda rank, step: 20 + 7 * rank + step % 3}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_error_feedback_sends_later_what_it_did_not_send(rows):
    steps = 12
    lost = {}
    means = [expected(2, step, rows) for step in range(steps)]
    for feedback in (None, "factored"):
        found = train(og.RankDAD(rank=4, error_feedback=feedback), 2, steps, rows)[0][0]
        lost[feedback] = error(total(found, "0.weight"), total(means, "0.weight"))
    assert lost["factored"] < 0.75 * lost[None]


def test_a_discarded_step_is_as_if_it_had_not_been():
    """What was to be sent later is kept, and nothing of the void step is."""
    smooth, rough = (
        gradients_around_a_void_step(og.RankDAD(rank=2), 2, void=void) for void in (False, True)
    )
    for name in ("0.weight", "3.weight"):
        assert rough[0][3][name].equal(smooth[0][3][name])


@pytest.mark.parametrize("tolerance", [0.1, 0.3])
def test_the_rank_follows_the_tolerance(tolerance):
    """On the same batch again and again the second step knows the rank that suffices."""
    original = model()
    x = [decaying(40, 100, seed) for seed in (0, 1)]

    def body(rank, group):
        replica = copy.deepcopy(original)
        method = og.RankDAD(rank=30, tolerance=tolerance, error_feedback=None)
        session = og.distribute(replica, method, group=group)
        steps = [(backward(replica, x[rank]), session.stats().sent_bytes) for _ in range(3)]
        return steps

    (first, most), _, (last, fewest) = run_on_lasting_groups(2, body)[0]
    weight = mean_gradients(original, x)["0.weight"]
    assert error(first["0.weight"], weight) < 0.5 * error(last["0.weight"], weight)
    assert error(last["0.weight"], weight) < 1.5 * tolerance, "the sites' errors add up in the mean"
    assert fewest < 0.7 * most


def test_sites_may_send_different_ranks():
    """One site's gradient has rank one, the other's has many."""
    original = nn.Linear(60, 50)
    x = [torch.ones(30, 1) @ torch.randn(1, 60), torch.randn(30, 60)]

    def body(rank, group):
        replica = copy.deepcopy(original)
        method = og.RankDAD(rank=16, tolerance=0.2)
        session = og.distribute(replica, method, group=group)
        for _ in range(3):
            backward(replica, x[rank])
        return session.stats().sent_bytes

    one, many = run_on_lasting_groups(2, body)
    assert one < 0.3 * many


@pytest.mark.parametrize("sites", [2, 4])
def test_low_rank_is_sent_where_it_is_fewer_bytes(sites):
    rows_SK = [[10_000]] * sites
    for rank in range(1, 60):
        numbers = rank * 110 + 60
        for min_ratio in (1, 2):
            gathers = og.RankDAD(rank=rank, min_ratio=min_ratio, reduce="gather").compressor()
            pays = min_ratio * sites * numbers < 2 * LINEAR.dense_numel
            expected = Route.GATHER if pays else Route.DENSE
            assert gathers.route(LINEAR, rows_SK, tapped=False) == expected


def test_few_rows_travel_exactly():
    found = train(og.RankDAD(rank=8), 2, 2, rows=lambda rank, step: 5)
    for name, gradient in found[0][0][1].items():
        assert error(gradient, expected(2, 1, lambda rank, step: 5)[name]) < 5e-6, name


MISTAKES = {
    "rank": {"rank": 0},
    "tolerance": {"tolerance": 1.0},
    "solver": {"solver": "magic"},
    "iterations": {"iterations": -1},
    "error_feedback": {"error_feedback": "full"},
    "feedback_rank": {"feedback_rank": 0},
    "reduce": {"reduce": "sum"},
    "wire": {"wire": "bf16"},
    "min_ratio": {"min_ratio": 0.5},
    "bucket_bytes": {"bucket_bytes": 0},
}


@pytest.mark.parametrize(("name", "settings"), MISTAKES.items(), ids=MISTAKES)
def test_a_wrong_setting_is_named(name, settings):
    with pytest.raises(ValueError, match=rf"RankDAD: {name}="):
        og.RankDAD(**settings)
