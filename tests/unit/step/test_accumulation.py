"""Accumulation with no_sync: factors while they pay, and the pooled gradient whatever happens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import outergrad as og
from cases import SHARED_STREAM, build, relative_error, run, to_double
from covering import covering
from ranks import run_on_lasting_groups

pytestmark = pytest.mark.usefixtures("large_matrices")

SITES = 2
PASSES = 8
CASES = build()


class Net(nn.Module):
    """Layers with and without a rule; `last` can be used without the others."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(30, 40), nn.Linear(40, 48)
        self.middle, self.norm = nn.Linear(48, 48), nn.LayerNorm(48)
        self.last = nn.Linear(48, 12)

    def forward(self, x, ids, *, only_last=False):
        if only_last:
            return self.last(x)
        h = self.first(self.table(ids) + x[:, :40]).relu()
        return self.last(self.norm(self.middle(h)))


def build_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


NET, OTHER_NET = build_net(0), build_net(1)
X = torch.randn(SITES, PASSES, 3, 48, generator=torch.Generator().manual_seed(2))
IDS = torch.randint(0, 30, (SITES, PASSES, 3), generator=torch.Generator().manual_seed(3))


@dataclass
class Site:
    """Runs passes of a model that is distributed, or, for the reference, is not."""

    model: Net
    rank: int
    rows: int
    no_sync: Callable[[], Any] = nullcontext

    def batch(self, k: int, rows: int | None = None):
        rows = self.rows if rows is None else rows
        dtype = self.model.last.weight.dtype
        return X[self.rank, k, :rows].to(dtype, copy=True), IDS[self.rank, k, :rows]

    def loss(self, k: int, rows: int | None = None, **kwargs: Any) -> torch.Tensor:
        return (self.model(*self.batch(k, rows), **kwargs) ** 2).sum() / 10

    def local(self, k: int, **kwargs: Any) -> None:
        with self.no_sync():
            self.loss(k, **kwargs).backward()

    def shared(self, k: int, **kwargs: Any) -> None:
        self.loss(k, **kwargs).backward()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


# -- what users do between the passes ------------------------------------------------------------


def nothing_else(site):
    site.local(0)
    site.local(1)
    site.shared(2)


def all_forwards_first(site):
    losses = [site.loss(k) for k in range(3)]
    with site.no_sync():
        losses[0].backward()
        losses[1].backward()
    losses[2].backward()


def inputs_overwritten(site):
    x, ids = site.batch(0)
    with site.no_sync():
        ((site.model(x, ids, only_last=True) ** 2).sum() / 10).backward()
    x.fill_(7.0)
    site.shared(1)


def other_weights(site):
    site.local(0)
    dtype = site.model.last.weight.dtype
    site.model.load_state_dict({n: t.to(dtype) for n, t in OTHER_NET.state_dict().items()})
    site.local(1)
    site.shared(2)


def more_passes_on_one_site(site):
    for k in range(3 * site.rank):
        site.local(k)
    site.shared(3)


def no_rows_on_one_site(site):
    site.local(0, rows=site.rank)
    site.local(1)
    site.shared(2, rows=site.rank)


def no_rows_of_its_own(site):
    site.local(0)
    site.shared(2, rows=0)


def one_layer_only_at_first(site):
    site.local(0, only_last=True)
    site.local(1)
    site.shared(2)


def one_layer_only_at_last(site):
    site.local(0)
    site.shared(1, only_last=True)


def copied(site):
    site.local(0)
    copy.deepcopy(site.model)(*site.batch(1)).sum().backward()
    site.shared(2)


def reset(site):
    site.local(0)
    site.model.zero_grad()
    site.local(1)
    site.shared(2)


def reset_at_last(site):
    site.local(0)
    site.model.zero_grad()
    site.shared(1)


def raising_at(site, k, layer, *, in_output=False):
    def fail(gradient):
        raise ZeroDivisionError

    def hook(module, args, output):
        (output if in_output else args[0]).register_hook(fail)

    handle = layer.register_forward_hook(hook)
    loss = site.loss(k)
    handle.remove()
    loss.backward()


def raised(site):
    site.local(0)
    with pytest.raises(ZeroDivisionError), site.no_sync():
        raising_at(site, 1, site.model.middle)
    site.shared(2)


def raised_at_first(site):
    with pytest.raises(ZeroDivisionError), site.no_sync():
        raising_at(site, 0, site.model.middle)
    site.local(1)
    site.shared(2)


def raised_before_any_gradient(site):
    site.local(0)
    with pytest.raises(ZeroDivisionError), site.no_sync():
        raising_at(site, 1, site.model.last, in_output=True)
    site.shared(2)


STACKED = [
    nothing_else,
    all_forwards_first,
    inputs_overwritten,
    other_weights,
    more_passes_on_one_site,
    no_rows_on_one_site,
    no_rows_of_its_own,
    one_layer_only_at_first,
    one_layer_only_at_last,
    copied,
    reset,
    reset_at_last,
    raised,
    raised_at_first,
    raised_before_any_gradient,
]
"""After these the middle layer's rows of all passes still travel as factors."""


def scaled(site):
    site.local(0)
    for gradient in site.gradients():
        gradient.mul_(0.5)
    site.local(1)
    site.shared(2)


def scaled_on_one_site(site):
    site.local(0)
    for gradient in site.gradients()[: -1 if site.rank else 0]:
        gradient.mul_(0.5)
    site.shared(2)


def scaled_behind_the_version_counter(site):
    site.local(0)
    for gradient in site.gradients():
        gradient.data.mul_(0.5)
    site.local(1)
    site.shared(2)


def scaled_by_numpy_at_last(site):
    site.local(0)
    site.local(1)
    for gradient in site.gradients():
        gradient.numpy()[...] *= 2
    site.shared(2)


def turned_upside_down(site):
    site.local(0)
    for gradient in site.gradients():
        gradient.copy_(gradient.flip(0))
    site.shared(1)


def clipped(site):
    site.local(0)
    nn.utils.clip_grad_norm_(site.model.parameters(), 0.01)
    site.shared(1)


def one_bias_changed(site):
    site.local(0)
    site.model.middle.bias.grad.add_(1)
    site.shared(1)


def replaced(site):
    site.local(0)
    for p in site.model.parameters():
        p.grad = p.grad * 3
    site.local(1)
    site.shared(2)


def replaced_by_an_equal_one(site):
    site.local(0)
    for p in site.model.parameters():
        p.grad = p.grad.clone()
    site.shared(2)


def zeroed_in_place(site):
    site.local(0)
    site.model.zero_grad(set_to_none=False)
    site.local(1)
    site.shared(2)


def zeroed_in_place_at_last(site):
    site.local(0)
    site.model.zero_grad(set_to_none=False)
    site.shared(2)


def one_weight_reset(site):
    site.local(0)
    site.model.middle.weight.grad = None
    site.local(1)
    site.shared(2)


def one_weight_reset_at_last(site):
    site.local(0)
    site.model.middle.weight.grad = None
    site.shared(2)


def a_gradient_before(site):
    site.model.middle.bias.grad = torch.ones_like(site.model.middle.bias)
    site.local(0)
    site.shared(1)


def a_hook_that_scales(site):
    handle = site.model.middle.weight.register_post_accumulate_grad_hook(halve)
    site.local(0)
    handle.remove()
    site.shared(1)


def halve(p):
    p.grad.mul_(0.5)


def some_parameters_only(site):
    with site.no_sync():
        site.loss(0).backward(inputs=[site.model.middle.weight])
    site.local(1)
    site.shared(2)


def some_parameters_only_at_last(site):
    site.local(0)
    site.loss(1).backward(inputs=[site.model.middle.weight])


def a_step_before(site):
    site.local(0)
    site.shared(1)
    site.local(2)
    site.shared(3)


def penalty(model):
    return sum((p**2).sum() for p in model.parameters()) / 100


def a_penalty(site):
    site.local(0)
    with site.no_sync():
        (site.loss(1) + penalty(site.model)).backward()
    site.shared(2)


def a_penalty_on_biases(site):
    site.local(0)
    with site.no_sync():
        (site.loss(1) + (site.model.middle.bias**2).sum()).backward()
    site.shared(2)


FORMED = [
    scaled,
    scaled_on_one_site,
    scaled_behind_the_version_counter,
    scaled_by_numpy_at_last,
    turned_upside_down,
    clipped,
    one_bias_changed,
    replaced,
    replaced_by_an_equal_one,
    zeroed_in_place,
    zeroed_in_place_at_last,
    one_weight_reset,
    one_weight_reset_at_last,
    a_gradient_before,
    a_hook_that_scales,
    some_parameters_only,
    some_parameters_only_at_last,
    a_step_before,
    a_penalty,
    a_penalty_on_biases,
]
"""After these the middle layer's formed gradient counts, on one site at least."""


def a_penalty_at_last(site):
    site.local(0)
    (site.loss(1) + penalty(site.model)).backward()


def a_penalty_at_last_on_one_site(site):
    site.local(0)
    (site.loss(1) + site.rank * penalty(site.model)).backward()


MIXED = [a_penalty_at_last, a_penalty_at_last_on_one_site]
"""Here factors and a formed gradient travel."""

FULL_RANK = [a_penalty, a_step_before, *MIXED]
"""Too much for a low rank: all entries of the weights, or passes of more than one step."""

OF_LOW_RANK = [script for script in [*STACKED, *FORMED] if script not in FULL_RANK]

EXACT: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "dad raw": og.DAD(reveal="activations"),
    "dad forced": og.DAD(always=True),
    "dad, small buckets": og.DAD(bucket_bytes=1),
    "rank-dad, full rank": og.RankDAD(rank=1000),
    "sparse, all entries": og.Sparse(density=1.0, always=True),
}
LOW_RANK: dict[str, Any] = {
    "rank-dad": og.RankDAD(rank=8),
    "rank-dad, all-reduced": og.RankDAD(rank=8, reduce="all_reduce"),
    "powersgd": og.PowerSGD(rank=8, min_ratio=1),
}
"""With one row in each of at most four passes on two sites this is the full rank."""
LOWER_RANK: dict[str, Any] = {
    "rank-dad": og.RankDAD(rank=4),
    "rank-dad, all-reduced": og.RankDAD(rank=4, reduce="all_reduce"),
    "powersgd": og.PowerSGD(rank=4, min_ratio=1),
}


def pooled(script, rows: int) -> dict[str, torch.Tensor]:
    """Mean over the sites of what the script leaves without any of our code, in float64."""
    sites = [Site(copy.deepcopy(NET).double(), rank, rows) for rank in range(SITES)]
    for site in sites:
        script(site)
    named = [dict(site.model.named_parameters()) for site in sites]
    return {name: mean_of([params[name].grad for params in named]) for name in named[0]}


def mean_of(gradients):
    present = [g for g in gradients if g is not None]
    return sum(present) / len(gradients) if present else None


def run_script(script, method, rows: int, rounds: int = 3):
    """Per site the gradients, and how the layers travelled, after every round of the script."""

    def body(rank, group):
        model, results = copy.deepcopy(NET), []
        session = og.distribute(model, method, group=group)
        for _ in range(rounds):
            model.zero_grad()
            model.load_state_dict(NET.state_dict())
            script(Site(model, rank, rows, session.no_sync))
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in named(model)}
            results.append((gradients, session.stats().layers))
        session.detach()
        return results

    return run_on_lasting_groups(SITES, body)


def start(rank, group, method, rows):
    """A new site of a new session."""
    model = copy.deepcopy(NET)
    session = og.distribute(model, method, group=group)
    return Site(model, rank, rows, session.no_sync), session


def named(model):
    return list(model.named_parameters())


def assert_close(gradients, expected, limit):
    for name, gradient in gradients.items():
        error = relative_error(gradient, expected[name])
        assert error < limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("script", "label"), covering([*STACKED, *FORMED, *MIXED], EXACT.keys(), quick=12, every=3)
)
def test_the_gradient_is_the_pooled_one(label, script):
    expected = pooled(script, rows=2)
    for site in run_script(script, EXACT[label], rows=2):
        for gradients, _ in site:
            assert_close(gradients, expected, 5e-6)


@pytest.mark.parametrize(
    ("script", "label"), covering(OF_LOW_RANK, LOW_RANK.keys(), quick=3, every=3)
)
def test_the_gradient_is_the_pooled_one_where_the_rank_suffices(label, script):
    expected = pooled(script, rows=1)
    for site in run_script(script, LOW_RANK[label], rows=1, rounds=1):
        assert_close(site[0][0], expected, 2e-3)


@pytest.mark.parametrize(
    ("script", "label"), covering(OF_LOW_RANK, LOWER_RANK.keys(), quick=6, every=3)
)
def test_a_lower_rank_loses_some_of_the_gradient_and_counts_nothing_twice(label, script):
    expected = pooled(script, rows=3)
    for site in run_script(script, LOWER_RANK[label], rows=3, rounds=1):
        gradients = site[0][0]
        vectors = {n: g for n, g in gradients.items() if g is not None and g.dim() == 1}
        assert_close(vectors, expected, 5e-6)
        assert_close(gradients, expected, 0.8)


@pytest.mark.parametrize(
    ("script", "label"),
    covering([*STACKED, *FORMED], ["dad", "dad raw", "rank-dad, full rank"], quick=3, every=3),
)
def test_what_is_left_alone_travels_as_factors_and_nothing_else(label, script):
    for site in run_script(script, EXACT[label], rows=2, rounds=1):
        _, layers = site[0]
        how = layers["middle.weight"].travels
        assert (how == "factors") == (script in STACKED)


@pytest.mark.parametrize(("name", "label"), covering(CASES.keys(), EXACT.keys(), quick=12, every=6))
def test_every_layer_accumulates(name, label):
    """Two passes in no_sync and a shared one, for every rule, against passes without ours."""
    if name in SHARED_STREAM:
        pytest.skip("threads share one random stream")
    case = CASES[name]()

    reference = copy.deepcopy(case.model).double()
    for batch in case.batches[:SITES]:
        for k in range(3):
            (run(reference, case, to_double(batch)) * (k + 1) / SITES).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    def body(rank, group):
        return accumulate(case, EXACT[label], rank, group)

    for gradients in run_on_lasting_groups(SITES, body):
        assert_close(gradients, expected, 5e-6)


def accumulate(case, method, rank, group):
    model = copy.deepcopy(case.model)
    session = og.distribute(model, method, group=group)
    for _ in range(2):
        model.zero_grad()
        with session.no_sync():
            run(model, case, case.batches[rank]).backward()
            (2 * run(model, case, case.batches[rank])).backward()
        (3 * run(model, case, case.batches[rank])).backward()
    session.detach()
    return {name: p.grad for name, p in model.named_parameters()}


def test_no_sync_leaves_the_local_gradient():
    def body(rank, group):
        alone = Site(copy.deepcopy(NET).double(), rank, 2)
        site, _ = start(rank, group, og.DAD(), rows=2)
        for k in range(3):
            site.local(k)
            alone.local(k)
            assert_close(grads_of(site.model), grads_of(alone.model), 1e-6)

    run_on_lasting_groups(SITES, body)


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


def test_factors_are_far_fewer_bytes_than_the_gradient():
    def body(rank, group):
        sent = {}
        for label, method in {"dense": og.Dense(), "dad": og.DAD()}.items():
            site, session = start(rank, group, method, rows=1)
            nothing_else(site)
            sent[label] = session.stats().sent_bytes
            session.detach()
        assert sent["dad"] < sent["dense"] / 3

    run_on_lasting_groups(SITES, body)


def test_the_gradient_stays_the_same_tensor():
    def body(rank, group):
        site, _ = start(rank, group, og.DAD(), rows=2)
        site.local(0)
        kept = [p.grad for p in site.model.parameters()]
        site.shared(1)
        assert all(p.grad is g for p, g in zip(site.model.parameters(), kept, strict=True))

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize(
    "method", [og.DAD(), og.DAD(always=True), og.RankDAD(rank=4), og.RankDAD(rank=1000)], ids=str
)
def test_many_passes_keep_few_rows_and_go_dense(method):
    def body(rank, group):
        site, session = start(rank, group, method, rows=3)
        limit, most = sum(p.numel() for p in site.model.parameters()), 0
        for k in range(60):
            site.local(k % PASSES)
            most = max(most, session._exchange.accumulator.numel)
        assert 0 < most <= limit
        assert session._exchange.accumulator.numel == 0
        site.shared(0)
        assert "middle.weight" in session.stats().layers
        return grads_of(site.model)

    def script(site):
        for k in range(60):
            site.local(k % PASSES)
        site.shared(0)

    expected = pooled(script, rows=3)
    for gradients in run_on_lasting_groups(SITES, body):
        rank = getattr(method, "rank", 1000)
        assert_close(gradients, expected, 5e-6 if rank > 100 else 0.9)


def test_layers_that_do_not_pay_are_left_alone_in_the_next_round():
    """Rows of all passes count, so what is dense in the end is not tapped in vain again."""

    def body(rank, group):
        site, session = start(rank, group, og.DAD(), rows=3)
        for _ in range(3):
            site.model.zero_grad()
            for k in range(12):
                site.local(k % PASSES)
                assert session._exchange.accumulator.numel == 0 or session.stats().step == 0
            site.shared(0)

    run_on_lasting_groups(SITES, body)


def test_detach_drops_the_rows_and_leaves_the_gradient():
    def body(rank, group):
        alone = Site(copy.deepcopy(NET).double(), rank, 2)
        site, session = start(rank, group, og.DAD(), rows=2)
        site.local(0)
        assert session._exchange.accumulator.numel > 0
        session.detach()
        assert session._exchange.accumulator.numel == 0
        site.local(1)
        alone.local(0)
        alone.local(1)
        assert_close(grads_of(site.model), grads_of(alone.model), 1e-6)

    run_on_lasting_groups(SITES, body)


def test_rows_of_a_reset_gradient_are_not_kept_alive():
    def body(rank, group):
        site, session = start(rank, group, og.DAD(), rows=2)
        sizes = []
        for _ in range(3):
            site.local(0)
            site.model.zero_grad()
            sizes.append(session._exchange.accumulator.numel)
        assert sizes == sizes[:1] * 3

    run_on_lasting_groups(SITES, body)


def test_a_site_that_raises_in_the_shared_step_discards_it():
    def body(rank, group):
        site, _ = start(rank, group, og.DAD(), rows=2)
        site.local(0)
        if rank == 0:
            with pytest.raises(ZeroDivisionError):
                raising_at(site, 1, site.model.middle)
            site.model.zero_grad()
            nothing_else(site)
        else:
            with pytest.raises(og.StepDiscardedError):
                site.shared(1)
            site.model.zero_grad()
            nothing_else(site)
        return grads_of(site.model)

    expected = pooled(nothing_else, rows=2)
    for gradients in run_on_lasting_groups(SITES, body):
        assert_close(gradients, expected, 5e-6)


def test_a_round_of_other_length_surprises_nobody_for_long():
    """Headers are left out after equal rounds; then rows change, and sites stack or not."""
    counts = [(2, 2), (2, 2), (2, 2), (1, 2), (2, 2), (2, 2), (2, 2), (2, 2), (7, 0), (0, 2)]
    expected = [pooled(lambda site, c=count: passes(site, c), 2) for count in counts]

    def body(rank, group):
        site, _ = start(rank, group, og.DAD(), rows=2)
        for count, gradients in zip(counts, expected, strict=True):
            site.model.zero_grad()
            passes(site, count)
            assert_close(grads_of(site.model), gradients, 5e-6)

    run_on_lasting_groups(SITES, body)


def passes(site, counts):
    for k in range(counts[site.rank]):
        site.local(k)
    site.shared(7)


def test_passes_of_several_dtypes_are_not_rounded_to_the_coarsest():
    def script(site):
        with torch.autocast("cpu", dtype=torch.bfloat16), site.no_sync():
            (site.loss(0) / 1000).backward()
        site.shared(1)

    def plain(site):
        (site.loss(0) / 1000).backward()
        site.shared(1)

    def body(rank, group):
        site, session = start(rank, group, og.DAD(), rows=2)
        script(site)
        assert session.stats().layers["middle.weight"].travels == "factors"
        return grads_of(site.model)

    for gradients in run_on_lasting_groups(SITES, body):
        assert_close(gradients, pooled(plain, rows=2), 2e-4)
