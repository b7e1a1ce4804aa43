"""What is shared is the sum over all sites of clipped gradients of samples, over the batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import outergrad as og
from by_sample import (
    Gradients,
    SampleCase,
    built,
    by_sample,
    check_close,
    length,
    loss_of,
    times,
    total,
)
from cases import Branches, relative_error
from covering import covering
from ranks import run_on_lasting_groups

CLIP, BATCH = 0.4, 10
CASES = built()
EXACT = {
    "dad": og.DAD(always=True),
    "dense": og.Dense(),
    "sketches": og.RankDAD(rank=1000, reduce="all_reduce", error_feedback=None),
    "powersgd": og.PowerSGD(rank=1000, min_ratio=1, error_feedback=False),
    "sparse": og.Sparse(density=1.0, select="random", error_feedback=False),
}
LITTLE = 1e-9
"""So little noise that a gradient is formed, and nothing else is to be seen of it."""
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


def flat(sample: Gradients) -> Gradients:
    return times(min(1.0, CLIP / length(sample)) if length(sample) else 1.0, sample)


def automatic(sample: Gradients) -> Gradients:
    return times(CLIP / (length(sample) + 0.01), sample)


def per_layer(parts: Sequence[Sequence[str]]) -> Callable[[Gradients], Gradients]:
    limit = CLIP / math.sqrt(len(parts))

    def clip(sample: Gradients) -> Gradients:
        found: Gradients = {}
        for names in parts:
            part = {name: sample[name] for name in names}
            found |= times(min(1.0, limit / max(length(part), 1e-30)), part)
        return found

    return clip


def modules_of(model: nn.Module) -> list[list[str]]:
    """Names of the parameters of each layer."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return [[n for n in names if n.rpartition(".")[0] == module] for module in modules]


def shared(case: SampleCase, method: Any, **about: Any) -> list[Gradients]:
    """What each site has in `param.grad` after a step."""

    def body(rank, group):
        model = copy.deepcopy(case.model)
        private = og.Private(**{"clip": CLIP, "noise": 0.0, "batch": BATCH, **about})
        session = og.distribute(model, method, group=group, transform=private)
        loss_of(model, case.batches[rank]).backward()
        session.detach()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return run_on_lasting_groups(len(case.batches), body)


def expected(case: SampleCase, clip: Callable[[Gradients], Gradients]) -> Gradients:
    """The sum over the samples of all sites, over the batch, in float64."""
    sites = range(len(case.batches))
    samples = [times(len(case.batches[s]), one) for s in sites for one in by_sample(case, s)]
    return times(1 / BATCH, total([clip(one) for one in samples]))


@pytest.mark.parametrize(
    ("name", "method", "noise"),
    covering(list(CASES), list(EXACT), [0.0, LITTLE], quick=12, every=6),
)
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_clipped_sums_are_those_of_samples_one_by_one(name, method, noise, clipping):
    case = CASES[name]
    wanted = expected(case, {"flat": flat, "automatic": automatic}[clipping])
    for grads in shared(case, EXACT[method], clipping=clipping, noise=noise):
        check_close(grads, wanted)


@pytest.mark.parametrize("name", ["linear", "positions", "conv", "embedding", "used twice"])
@pytest.mark.parametrize("noise", [0.0, LITTLE])
def test_layers_are_clipped_by_themselves(name, noise):
    """Each to C over the root of their number, so that all of a sample is at most C."""
    case = CASES[name]
    clip = per_layer(modules_of(case.model))
    for grads in shared(case, og.Dense(), clipping="per_layer", noise=noise):
        check_close(grads, expected(case, clip))


def test_tied_layers_count_as_one():
    case = CASES["tied"]
    for grads in shared(case, og.Dense(), clipping="per_layer"):
        check_close(grads, expected(case, flat))


def test_a_sample_is_never_longer_than_the_limit():
    """What the noise is measured by: one sample more or less changes the sum by C at most."""
    case = CASES["linear"]
    for clipping in ("flat", "per_layer", "automatic", "adaptive"):
        for factor in (0.01, 1.0, 100.0):
            batches = [factor * case.batches[0], factor * case.batches[1][:1]]
            less = [batches[0], batches[1][:0]]
            whole, without = (
                shared(SampleCase(case.model, part), og.Dense(), clipping=clipping)[0]
                for part in (batches, less)
            )
            change = {n: BATCH * (g - without.get(n, 0 * g)) for n, g in whole.items()}
            assert 0 < length(change) < CLIP * (1 + 1e-4)


def test_nearly_cancelling_uses_are_clipped_to_the_limit():
    """Of one weight in two layers, whose gradients are 10,000 times as long as their sum."""
    forward = lambda m, x: 1e4 * (m.one(x) - m.two(x + 1e-4 * x.roll(1, 1)))  # noqa: E731
    one, two = (nn.Linear(30, 40, bias=False) for _ in range(2))
    two.weight = one.weight
    model = Branches(forward, one=one, two=two)
    case = SampleCase(model, [torch.randn(1, 5, 30)])
    assert 0.1 < length(by_sample(case, 0)[0]) / CLIP < 1e4
    for noise in (0.0, LITTLE):
        grads = shared(case, og.Dense(), noise=noise)[0]
        of_sum = BATCH * length({n: g.double() for n, g in grads.items()})
        assert 0.9 * CLIP < of_sum <= CLIP * (1 + 1e-5)


def test_bfloat16_is_rounded_behind_the_noise(monkeypatch):
    """Sums and noise are of float32 up to then."""
    added = []

    def add(source, t, deviation):
        added.append(t.dtype)
        return t

    monkeypatch.setattr("outergrad.private.noise.add", add)
    linear = CASES["linear"]
    batches = [x.bfloat16() for x in linear.batches]
    case = SampleCase(copy.deepcopy(linear.model).bfloat16(), batches)
    wanted = expected(
        SampleCase(copy.deepcopy(case.model).float(), [x.float() for x in batches]), flat
    )
    for grads in shared(case, og.Dense(), noise=1.0):
        assert {g.dtype for g in grads.values()} == {torch.bfloat16}
        assert all(relative_error(grads[name], g) < 0.02 for name, g in wanted.items())
    assert set(added) == {torch.float32}


def test_an_empty_batch_adds_nothing_but_noise():
    case = SampleCase(CASES["linear"].model, [torch.randn(3, 6), torch.randn(0, 6)])
    alone = SampleCase(case.model, case.batches[:1])
    for grads in shared(case, og.Dense()):
        check_close(grads, expected(alone, flat))
    empty = SampleCase(case.model, [torch.randn(0, 6)] * 2)
    grads = shared(empty, og.Dense(), noise=1.0)[0]
    assert length(grads) > 0
    assert all(bool(g.isfinite().all()) for g in grads.values())


def test_adaptive_clipping_is_flat_until_the_threshold_moves():
    case = CASES["linear"]
    for grads in shared(case, og.Dense(), clipping="adaptive"):
        check_close(grads, expected(case, flat))


def test_without_noise_factors_travel():
    case = CASES["wide"]

    def sent(noise):
        def body(rank, group):
            model = copy.deepcopy(case.model)
            private = og.Private(clip=CLIP, noise=noise, batch=BATCH)
            session = og.distribute(model, og.DAD(), group=group, transform=private)
            loss_of(model, case.batches[rank]).backward()
            session.detach()
            return {line.travels for line in session.coverage()}

        return run_on_lasting_groups(2, body)[0]

    assert sent(0.0) == {"factors"}
    assert sent(1.0) == {"dense"}
