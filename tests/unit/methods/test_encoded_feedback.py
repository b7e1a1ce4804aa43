"""What encoding loses is remembered, and what a step that comes to nothing leaves is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import outergrad as og
from coded import CODECS, DROPPING, METHODS, WEIGHTS, few
from covering import covering
from low_rank import (
    backward,
    batch,
    error,
    expected,
    gradients_around_a_void_step,
    model,
    total,
    train,
)
from outergrad.methods.low_rank import settings as _settings
from ranks import run_on_lasting_groups

REDUCES = ["gather", "two_way"]
MEMORIES = {
    "of small matrices": (50_000, {}),
    "dense": (0, {"error_feedback": "dense"}),
    "as many triplets as there are": (0, {"feedback_rank": 100}),
}


def many(_rank: int, _step: int) -> int:
    return 40


@pytest.mark.parametrize(
    ("codecs", "reduce", "memory", "sites"),
    covering(DROPPING, REDUCES, MEMORIES, [2, 3], quick=4, every=2),
)
def test_nothing_is_lost_where_all_is_remembered(codecs, reduce, memory, sites, monkeypatch):
    """What was applied and the mean residual are the sum of the mean gradients."""
    small, memory = memory
    monkeypatch.setattr(_settings, "_SMALL", small)
    steps, original = 5, model()
    method = og.RankDAD(rank=2, wire=codecs, reduce=reduce, **memory)

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group)
        found = [backward(replica, batch(rank, step, 40)) for step in range(steps)]
        return found, session._exchange.compressors.states()[0]["own"]["memories"]

    results = run_on_lasting_groups(sites, body)
    means = [expected(sites, step) for step in range(steps)]
    for name in WEIGHTS:
        residual = sum(residual_of(memories[name]) for _, memories in results) / sites
        assert error(total(results[0][0], name) + residual, total(means, name)) < 1e-4, name


def residual_of(memory: dict[str, Tensor]) -> Tensor:
    if "unsent" in memory:
        return memory["unsent"][0].double()
    return memory["unsent_deltas"][0].double().mT @ memory["unsent_activations"][0].double()


@pytest.mark.parametrize(
    ("codecs", "reduce", "rows"),
    covering(DROPPING, REDUCES, {"few rows": few, "many": many}, quick=4, every=2),
)
def test_error_feedback_sends_later_what_encoding_lost(codecs, reduce, rows, large_matrices):
    """Also of a layer whose rows are few enough to travel exactly: that is, but for the codecs."""
    steps, lost = 16, {}
    means = [expected(2, step, rows) for step in range(steps)]
    for feedback in (None, "factored"):
        method = og.RankDAD(rank=6, wire=codecs, reduce=reduce, error_feedback=feedback)
        found = train(method, 2, steps, rows)[0][0]
        lost[feedback] = error(total(found, "0.weight"), total(means, "0.weight"))
    assert lost["factored"] < 0.75 * lost[None]


@pytest.mark.parametrize(
    ("codecs", "reduce", "feedback"),
    covering(DROPPING, REDUCES, ["factored", "dense", "auto"], quick=4, every=2),
)
def test_a_discarded_step_is_as_if_it_had_not_been(codecs, reduce, feedback, large_matrices):
    method = og.RankDAD(rank=2, wire=codecs, reduce=reduce, error_feedback=feedback)
    smooth, rough = (gradients_around_a_void_step(method, 3, void=void) for void in (False, True))
    for name in WEIGHTS:
        assert all(site[3][name].equal(smooth[0][3][name]) for site in rough)


@pytest.mark.parametrize(
    ("codecs", "method", "value"),
    covering(CODECS, METHODS, [torch.nan, torch.inf], quick=4, every=2),
)
def test_what_is_not_finite_is_seen_by_all_and_not_remembered(codecs, method, value):
    def body(rank, group):
        replica = model()
        og.distribute(replica, method(wire=codecs), group=group)
        found = []
        for step in range(4):
            x = batch(rank, step, 40)
            x[0, 0] = value if (rank, step) == (1, 1) else x[0, 0]
            found.append(backward(replica, x)["0.weight"].isfinite().all().item())
        return found

    assert run_on_lasting_groups(3, body) == [[True, False, True, True]] * 3
