"""Sparse: what is not sent is owed, to the last entry, whatever becomes of a step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import SHARED_STREAM, build, pooled, run
from covering import covering
from low_rank import backward, batch, error, mean_gradients, model, total
from ranks import run_on_lasting_groups
from seeding import seed
from sparse_trainings import SELECTS, SUMMED, WEIGHTS, linear, lost, means_of, memories, owed, train

WIRES = {
    "float32": (),
    "bf16": og.wire.BF16(),
    "int8": og.wire.Int8(),
    "sign": og.wire.Sign(),
}
KINDS = [
    (select, name)
    for select in SELECTS
    for name in WIRES
    if (select, name) != ("random_blocks", "bf16")
]
STEPS = 12


@pytest.fixture(scope="module")
def means():
    """By sites; no site's gradients depend on the method."""
    return {sites: means_of(sites, STEPS) for sites in (2, 3)}


@pytest.mark.parametrize(
    ("kind", "sites", "density"), covering(KINDS, [2, 3], [0.3, 0.05, 0.01], quick=8, every=4)
)
def test_nothing_is_lost(kind, sites, density, means):
    """What was applied and what the sites owe is the sum of all gradients, to rounding.

    Where a sum over the sites is rounded, what that loses is lost.
    """
    select, wire = kind
    method = og.Sparse(density=density, select=select, wire=WIRES[wire], always=True)
    results = train(method, sites, STEPS)
    limit = 4e-3 if kind == ("random", "bf16") else 3e-7
    assert lost(results, sites, means[sites]) < limit
    for name in WEIGHTS:
        assert all(site[0][-1][name].equal(results[0][0][-1][name]) for site in results)
        assert all(site[1][name].norm() > 0 for site in results)


@pytest.mark.parametrize("select", SUMMED)
def test_what_a_site_rounds_before_a_sum_is_not_lost(select):
    """Twice the same number is exact in bfloat16: all that is left is what each site rounded."""
    method = og.Sparse(density=0.3, select=select, wire=og.wire.BF16())

    def body(rank, group):
        replica = linear(100, 80)
        session = og.distribute(replica, method, group=group)
        found = [backward(replica, batch(0, step, 40))["weight"] for step in range(4)]
        unsent = owed(session)["weight"].view(80, 100)
        session.detach()
        return found, unsent

    (first, owed_first), (_, owed_second) = run_on_lasting_groups(2, body)
    gradients = [mean_gradients(linear(100, 80), [batch(0, step, 40)]) for step in range(4)]
    assert all(gradient.equal(gradient.bfloat16().float()) for gradient in first)
    assert owed_first.equal(owed_second)
    whole = sum(gradient["weight"] for gradient in gradients)
    assert error(sum(g.double() for g in first) + owed_first, whole) < 3e-7


@pytest.mark.parametrize("select", SELECTS)
def test_without_a_memory_it_is_lost(select, means):
    method = og.Sparse(density=0.05, select=select, error_feedback=False)
    results = train(method, 2, STEPS)
    assert all(site[1] == {} for site in results)
    for name in WEIGHTS:
        assert error(total(results[0][0], name), total(means[2], name)) > 0.03


@pytest.mark.parametrize("select", SELECTS)
def test_nothing_is_lost_in_steps_that_start_again(select):
    """Rows that change surprise a site now and then: what was compressed is compressed again."""

    def rows(rank: int, step: int) -> int:
        return 5 + (2 * rank if step in (7, 12) else 0) + (step > 15)

    methods = {"0.*": og.Sparse(density=0.05, select=select), "3.*": og.DAD(always=True)}
    method = og.PerLayer({**methods, "*": og.Dense()})
    results = train(method, 2, STEPS, rows)
    applied = total(results[0][0], "0.weight")
    unsent = sum(site[1]["0.weight"] for site in results).view(applied.shape) / 2
    expected = means_of(2, STEPS, rows)
    assert error(applied + unsent, total(expected, "0.weight")) < 3e-7
    assert error(total(results[0][0], "3.weight"), total(expected, "3.weight")) < 5e-6


# -- momentum correction --------------------------------------------------------------------------


def simulated(gradients_S: list[list[Tensor]], density: float, momentum: float) -> list[Tensor]:
    """Algorithm 4 of Deep Gradient Compression on vanilla momentum SGD, in float64.

    `u = m u + g`, `v = v + u`; of v the largest entries are sent, and where they were, u and v
    become zero: error feedback with momentum correction and momentum factor masking.
    """
    sites, found = len(gradients_S), []
    count = round(density * gradients_S[0][0].numel())
    u_S = v_S = [torch.zeros_like(gradients_S[0][0]) for _ in range(sites)]
    for gradients in zip(*gradients_S, strict=True):
        u_S = [momentum * u + g for u, g in zip(u_S, gradients, strict=True)]
        v_S = [v + u for v, u in zip(v_S, u_S, strict=True)]
        masks = [torch.zeros_like(v, dtype=torch.bool) for v in v_S]
        for v, mask in zip(v_S, masks, strict=True):
            mask.view(-1)[v.flatten().abs().topk(count).indices] = True
        found.append(sum(v * mask for v, mask in zip(v_S, masks, strict=True)) / sites)
        u_S = [u * ~mask for u, mask in zip(u_S, masks, strict=True)]
        v_S = [v * ~mask for v, mask in zip(v_S, masks, strict=True)]
    return found


@pytest.mark.parametrize(
    ("select", "sites", "momentum"), covering(["threshold", "topk"], [2, 3], [0.0, 0.9], quick=2)
)
def test_momentum_is_corrected_as_in_deep_gradient_compression(select, sites, momentum):
    results = train(og.Sparse(density=0.03, select=select, momentum=momentum), sites, STEPS)
    original = model()
    local_S = [
        [mean_gradients(original, [batch(rank, step, 40)]) for step in range(STEPS)]
        for rank in range(sites)
    ]
    for name in WEIGHTS:
        gradients_S = [[gradients[name] for gradients in local] for local in local_S]
        expected = simulated(gradients_S, 0.03, momentum)
        for step, gradient in enumerate(results[0][0]):
            assert error(gradient[name], expected[step]) < 1e-5, (name, step)


def test_momentum_without_a_choice_is_that_of_the_optimizer():
    """At density 1 nothing is kept, neither of gradients nor of their momentum."""

    def body(rank, group):
        replica = linear(20, 10)
        method = og.Sparse(density=1.0, always=True, momentum=0.9)
        session = og.distribute(replica, method, group=group)
        found = backward(replica, batch(rank, 0, 5)[:, :20])["weight"]
        assert all(not t.any() for t in memories(session)["weight"].values())
        session.detach()
        return found

    xs = [batch(rank, 0, 5)[:, :20] for rank in range(2)]
    mean = mean_gradients(linear(20, 10), xs)["weight"]
    assert error(run_on_lasting_groups(2, body)[0], mean) < 5e-6


# -- what is not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "momentum"),
    covering(KINDS, [torch.nan, torch.inf], [0.0, 0.5], quick=4, every=2),
)
def test_what_is_not_finite_is_seen_by_all_and_not_remembered(kind, value, momentum):
    select, wire = kind
    method = og.Sparse(density=0.02, select=select, wire=WIRES[wire], momentum=momentum)

    def body(rank, group):
        replica, found = linear(100, 80), []
        session = og.distribute(replica, method, group=group)
        for step in range(4):
            x, before = batch(rank, step, 40), owed(session)
            x[0, 0] = value if (rank, step) == (1, 1) else x[0, 0]
            found.append(backward(replica, x)["weight"].isfinite().all().item())
            now = owed(session)["weight"]
            assert now.isfinite().all()
            assert not before or now.equal(before["weight"]) == ((rank, step) == (1, 1))
        session.detach()
        return found

    assert run_on_lasting_groups(3, body) == [[True, False, True, True]] * 3


@pytest.mark.parametrize("select", SELECTS)
def test_a_step_that_is_skipped_changes_nothing_of_what_is_owed(select):
    method = og.Sparse(density=0.02, select=select, momentum=0.5, warmup=6)

    def body(rank, group):
        replica = linear(100, 80)
        session, found = og.distribute(replica, method, group=group, max_bad_steps=2), []
        for step in range(5):
            x, before = batch(rank, step, 40), copy.deepcopy(memories(session))
            x[0, 0] = torch.nan if (rank, step) == (1, 2) else x[0, 0]
            backward(replica, x)
            if step == 2:
                assert replica.weight.grad is None
                after = memories(session)["weight"]
                assert all(t.equal(before["weight"][key]) for key, t in after.items())
            else:
                found.append(session.stats().layers["weight"].kept_rows)
        session.detach()
        return found

    kept = run_on_lasting_groups(2, body)
    expected = {"blocks": [1984, 1984, 1088, 576]}.get(
        select.removeprefix("random_"), [2000, 2000, 1064, 566]
    )
    assert kept == [expected] * 2


# -- weights of all kinds -------------------------------------------------------------------------

FEW: dict[str, Any] = {
    "topk": og.Sparse(density=0.2, select="topk", always=True),
    "blocks": og.Sparse(density=0.2, select="blocks", block=4, always=True, wire=og.wire.Int8()),
    "random": og.Sparse(density=0.2, select="random_blocks", block=4, always=True),
    "signs": og.Sparse(
        density=0.2,
        select="random_blocks",
        block=4,
        always=True,
        wire=og.wire.Sign(),
        vectors=og.wire.Int4(),
    ),
}


@pytest.mark.parametrize(
    ("name", "method"), covering(sorted(set(build()) - SHARED_STREAM), FEW, quick=6, every=3)
)
def test_nothing_is_lost_of_every_kind_of_layer(name, method):
    """Of tables, groups, tied weights, gates, weights without a rule; of unused ones, too."""
    case, sites, steps = build()[name](), 2, 3
    mean = pooled(case, sites)

    def body(rank, group):
        replica = copy.deepcopy(case.model)
        session = og.distribute(replica, method, group=group)
        applied = {n: None for n, _ in replica.named_parameters()}
        for _ in range(steps):
            seed(7)
            replica.zero_grad()
            run(replica, case, case.batches[rank]).backward()
            for n, p in replica.named_parameters():
                before, now = applied[n], p.grad
                applied[n] = now if before is None or now is None else before + now
        found = applied, owed(session)
        session.detach()
        return found

    results = run_on_lasting_groups(sites, body)
    applied = results[0][0]
    unsent_S = [whole(owing, applied) for _, owing in results]
    for parameter, gradient in mean.items():
        if gradient is None:
            assert applied[parameter] is None
            continue
        unsent = sum(unsent[parameter] for unsent in unsent_S) / sites
        difference = applied[parameter].double() + unsent - steps * gradient
        limit = 1e-5 * gradient.norm() + 1e-7
        assert difference.norm() < steps * limit, parameter


def whole(unsent: dict[str, Tensor], params: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """What is owed of whole parameters, from places as `weight` and `weight[0:4]`."""
    found = {n: torch.zeros(p.shape).double() for n, p in params.items() if p is not None}
    for place, residual in unsent.items():
        name, _, rows = place.partition("[")
        start, stop = (int(n) for n in rows[:-1].split(":")) if rows else (0, None)
        part = found[name][start:stop] if found[name].dim() else found[name]
        part += residual.view(part.shape)
    return found


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_models_of_other_dtypes(select, dtype):
    """What is owed is remembered in float32 at least, also of what rounding to bfloat16 loses."""
    sites, steps, original = 2, 12, linear(40, 30).to(dtype)
    method = og.Sparse(density=0.1, select=select, block=8)
    xs = [batch(rank, 0, 20)[:, :40].to(dtype) for rank in range(sites)]

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group)
        found = [backward(replica, xs[rank]) for _ in range(steps)]
        unsent = owed(session)["weight"].view(30, 40)
        wide = torch.promote_types(dtype, torch.float32)
        assert memories(session)["weight"]["unsent"].dtype == wide
        session.detach()
        own = copy.deepcopy(original)
        return found, unsent, backward(own, xs[rank])["weight"].double()

    results = run_on_lasting_groups(sites, body)
    applied = total(results[0][0], "weight")
    unsent, mean = (sum(site[k] for site in results) / sites for k in (1, 2))
    rounding = 4e-3 if dtype == torch.bfloat16 else 1e-14
    assert error(applied + unsent, steps * mean) < rounding


def test_a_site_without_a_gradient_sends_what_it_owes():
    """Its part of the weights was not in use, or counts nothing; what it owes does."""

    def body(rank, group):
        replica = linear(100, 80)
        method = og.Sparse(density=0.1, select="topk")
        session = og.distribute(replica, method, group=group, weighting="samples")
        found, before = [], math.inf
        for step in range(6):
            x = batch(rank, step, 0 if rank and step else 40)
            replica.zero_grad()
            (replica(x) ** 2).sum().div(40).backward()
            found.append(replica.weight.grad.clone())
            now = owed(session)["weight"]
            assert not (rank and step) or now.norm() < before
            before = now.norm()
        session.detach()
        return found, now

    results = run_on_lasting_groups(2, body)
    gradients = []
    for step in range(6):
        xs = [batch(rank, step, 40) for rank in range(1 if step else 2)]
        gradients.append(sum(square_gradient(linear(100, 80), x) for x in xs) / len(xs))
    applied = sum(g.double() for g in results[0][0])
    unsent = sum(site[1] for site in results).view(80, 100) / 2
    assert error(applied + unsent, sum(gradients)) < 1e-6


def square_gradient(original: nn.Module, x: Tensor) -> Tensor:
    replica = original.double()
    (replica(x.double()) ** 2).sum().div(40).backward()
    return replica.weight.grad
