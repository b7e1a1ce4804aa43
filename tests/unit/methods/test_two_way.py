"""rank-dAD through owners: what merging loses, what is kept of it, and how many bytes travel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import SHARED_STREAM, build
from covering import covering
from low_rank import (
    backward,
    batch,
    decaying,
    error,
    expected,
    gradients_around_a_void_step,
    mean_gradients,
    model,
    total,
    train,
)
from outergrad.core.owners import heaviest_share, owners
from outergrad.core.types import Link, Route, Unit
from outergrad.methods.low_rank.prices import best_way
from ranks import run_on_lasting_groups, run_ranks

pytestmark = pytest.mark.usefixtures("large_matrices")

SITES = [2, 3, 4]


def two_way(rank: int, **settings) -> og.RankDAD:
    return og.RankDAD(rank=rank, reduce="two_way", **settings)


def one_step(original: nn.Module, method: og.RankDAD, xs: list[Tensor]) -> list[dict[str, Tensor]]:
    """Every site's gradients."""

    def body(rank, group):
        replica = copy.deepcopy(original)
        og.distribute(replica, method, group=group)
        return backward(replica, xs[rank])

    return run_on_lasting_groups(len(xs), body)


@pytest.mark.parametrize("sites", SITES)
@pytest.mark.parametrize("rank", [1, 4])
def test_a_gradient_of_the_rank_is_reproduced(sites, rank):
    """As the mean over the sites, not their sum."""
    torch.manual_seed(1)
    original, basis = nn.Linear(50, 40), torch.randn(rank, 50)
    xs = [torch.randn(30, rank) @ basis for _ in range(sites)]
    mean = mean_gradients(original, xs)
    for gradients in one_step(original, two_way(rank), xs):
        for name, gradient in gradients.items():
            assert error(gradient, mean[name]) < 1e-5, name


@pytest.mark.parametrize("sites", SITES)
@pytest.mark.parametrize("wire", [(), og.wire.BF16()])
def test_replicas_are_equal_and_vectors_lose_nothing(sites, wire):
    found = train(two_way(4, wire=wire, error_feedback=None), sites, steps=3)
    for step in range(3):
        mean = expected(sites, step)
        for name, gradient in found[0][0][step].items():
            low_rank = name in ("0.weight", "3.weight")
            assert error(gradient, mean[name]) < (0.5 if low_rank else 5e-6), name
            assert all(gradient.equal(site[0][step][name]) for site in found), name


@pytest.mark.parametrize("sites", SITES)
def test_it_is_about_the_best_of_its_rank(sites):
    """On sites that see much the same."""
    torch.manual_seed(1)
    original, common = nn.Linear(50, 40), decaying(60, 50, 0)
    xs = [common + 0.1 * decaying(60, 50, 1 + rank) for rank in range(sites)]
    weight = mean_gradients(original, xs)["weight"]
    found = one_step(original, two_way(4), xs)[0]["weight"]
    best = torch.linalg.svdvals(weight)[4:].norm() / weight.norm()
    assert error(found, weight) <= 1.05 * best


@pytest.mark.parametrize("name", covering(sorted(set(build()) - SHARED_STREAM), quick=3))
def test_every_kind_of_layer_is_no_worse_than_without(name):
    case = build()[name]()

    def body(rank, group):
        gradients = {}
        for method in (og.Dense(), two_way(1)):
            replica = copy.deepcopy(case.model)
            og.distribute(replica, method, group=group)
            y = replica(*case.batches[0])
            case.loss(y[0] if isinstance(y, tuple) else y).backward()
            gradients[type(method)] = {n: p.grad for n, p in replica.named_parameters()}
        return gradients

    for gradients in run_on_lasting_groups(3, body):
        for parameter, dense in gradients[og.Dense].items():
            found = gradients[og.RankDAD][parameter]
            if dense is None:
                assert found is None
            else:
                assert (found - dense).norm() <= 1.0001 * dense.norm() + 1e-6, parameter


ROWS = {"steady": lambda rank, step: 40, "changing": lambda rank, step: 20 + 7 * rank + step % 3}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_error_feedback_sends_later_what_it_did_not_send(rows):
    steps, lost = 12, {}
    means = [expected(3, step, rows) for step in range(steps)]
    for feedback in (None, "factored", "dense"):
        found = train(two_way(4, error_feedback=feedback), 3, steps, rows)[0][0]
        lost[feedback] = error(total(found, "0.weight"), total(means, "0.weight"))
    assert lost["factored"] < 0.75 * lost[None]
    assert lost["dense"] < 0.75 * lost[None]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("sites", SITES)
def test_nothing_is_lost_with_a_dense_memory(sites, rows):
    """What was applied and the mean residual are the sum of the mean gradients."""
    steps, original = 5, model()

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, two_way(2, error_feedback="dense"), group=group)
        found = [backward(replica, batch(rank, step, rows(rank, step))) for step in range(steps)]
        return found, session._exchange.compressors.states()[0]["own"]["memories"]

    results = run_on_lasting_groups(sites, body)
    means = [expected(sites, step, rows) for step in range(steps)]
    for name in ("0.weight", "3.weight"):
        residual = sum(memories[name]["unsent"][0].double() for _, memories in results) / sites
        assert residual.norm() > 0
        assert error(total(results[0][0], name) + residual, total(means, name)) < 1e-4, name


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_site_without_rows_counts_as_zero(absent):
    """Also where it owns the layer, and it keeps what the merge discards."""
    torch.manual_seed(1)
    original = nn.ModuleDict({"common": nn.Linear(50, 40), "seldom": nn.Linear(40, 50)})
    xs = [decaying(40, 50, seed) for seed in range(3)]

    def loss(replica, x, *, everything):
        y = replica["common"](x)
        return (
            y.square() + (replica["seldom"](y.tanh()).square().sum() if everything else 0)
        ).mean()

    def body(rank, group):
        replica = copy.deepcopy(original)
        og.distribute(replica, two_way(3), group=group)
        for _ in range(2):
            replica.zero_grad()
            loss(replica, xs[rank], everything=rank != absent).backward()
        return {name: p.grad for name, p in replica.named_parameters()}

    pooled = copy.deepcopy(original).double()
    for rank, x in enumerate(xs):
        (loss(pooled, x.double(), everything=rank != absent) / 3).backward()
    results = run_on_lasting_groups(3, body)
    for name, p in pooled.named_parameters():
        assert error(results[0][name], p.grad) < (5e-6 if "bias" in name else 0.7), name
        assert all(results[0][name].equal(gradients[name]) for gradients in results), name


@pytest.mark.parametrize("feedback", ["factored", "dense"])
def test_a_discarded_step_is_as_if_it_had_not_been(feedback):
    method = two_way(2, error_feedback=feedback)
    smooth, rough = (gradients_around_a_void_step(method, 3, void=void) for void in (False, True))
    for name in ("0.weight", "3.weight"):
        assert all(site[3][name].equal(smooth[0][3][name]) for site in rough)


@pytest.mark.parametrize("feedback", ["factored", "dense"])
def test_what_is_not_finite_is_seen_by_all_and_not_remembered(feedback):
    def body(rank, group):
        replica = model()
        og.distribute(replica, two_way(2, error_feedback=feedback), group=group)
        found = []
        for step in range(3):
            x = batch(rank, step, 40)
            x[0, 0] = torch.inf if (rank, step) == (1, 1) else x[0, 0]
            found.append(backward(replica, x)["0.weight"].isfinite().all().item())
        return found

    assert run_on_lasting_groups(3, body) == [[True, False, True]] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_approximated_as_well(dtype):
    original, xs = model().to(dtype), [batch(rank, 0, 40).to(dtype) for rank in range(3)]
    mean = mean_gradients(original, xs)
    for gradients in one_step(original, two_way(8), xs):
        for name in ("0.weight", "3.weight"):
            assert gradients[name].dtype == dtype
            assert error(gradients[name], mean[name]) < 0.2, name


def test_bytes_are_those_of_an_all_reduce():
    """On a group of its own, where steps go without headers."""
    sites, layers, rank = 4, 8, 2
    torch.manual_seed(0)
    original = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))

    def body(index, group):
        sent = {}
        for reduce in ("gather", "two_way"):
            replica = copy.deepcopy(original)
            method = og.RankDAD(rank=rank, reduce=reduce)
            session = og.distribute(replica, method, group=group)
            for step in range(6):
                backward(replica, decaying(40, 64, 10 * step + index))
            stats = session.stats()
            assert sum(layer.sent_bytes for layer in stats.layers.values()) <= stats.sent_bytes
            sent[reduce] = stats.sent_bytes
            session.detach()
        return sent

    triplets_bytes = 4 * layers * rank * (64 + 64)
    for sent in run_ranks(sites, body):
        assert sent["two_way"] < 0.6 * sent["gather"]
        wanted = 2 * (sites - 1) / sites * triplets_bytes
        assert wanted < sent["two_way"] < 1.15 * wanted


def test_the_rank_follows_the_tolerance_on_the_way_to_the_owner():
    original = model()

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, two_way(30, tolerance=0.3), group=group)
        x = batch(rank, 0, 40)
        return [(backward(replica, x), session.stats().sent_bytes) for _ in range(3)]

    weight = expected(2, 0)["0.weight"]
    for (_, most), _, (last, fewest) in run_on_lasting_groups(2, body):
        assert fewest < most
        assert error(last["0.weight"], weight) < 0.45


def test_owners_share_evenly():
    sizes = {name: float(size) for name, size in zip("abcdef", [5, 9, 2, 7, 4, 3], strict=True)}
    assert set(owners(sizes, 3).values()) == {0, 1, 2}
    assert heaviest_share(sizes, 3) == 11
    assert heaviest_share({"a": 4.0}, 3) == 4
    assert heaviest_share({}, 3) == 0


# -- "auto" ---------------------------------------------------------------------------------------


def linears(count: int, width: int = 1000) -> list[Unit]:
    slots = [og.Slot(f"{i}", f"{i}.weight", width, width) for i in range(count)]
    return [Unit((slot,), (slot.weight,), width * width, (slot,)) for slot in slots]


FAST = Link(delay_s=1e-2, bytes_per_s=1e10)
SLOW = Link(delay_s=1e-5, bytes_per_s=1e5)
CHOICES = {
    "delays count: one round": (FAST, 16, 40, Route.GATHER),
    "bytes count: two ways": (SLOW, 16, 40, Route.TWO_WAY),
    "three sites, bytes count": (SLOW, 3, 40, Route.TWO_WAY),
    "a single layer has a single owner": (SLOW, 16, 1, Route.REDUCE),
}


@pytest.mark.parametrize(("link", "sites", "layers", "way"), CHOICES.values(), ids=CHOICES)
def test_auto_takes_the_fastest_way(link, sites, layers, way):
    compressor, units = og.RankDAD(rank=4).compressor(), linears(layers)
    assert compressor.wants_link(sites)
    compressor.settle_reduce(units, sites, link)
    assert compressor.route(units[0], [[10_000]] * sites, tapped=False) == way
    assert compressor.auto_way.way == way
    assert compressor.auto_way.link == link


def test_of_ways_that_are_about_as_fast_the_better_one():
    ways = (Route.GATHER, Route.TWO_WAY, Route.REDUCE)
    for seconds, best in {
        (1.09, 1.0, 2.0): Route.GATHER,
        (1.11, 1.0, 2.0): Route.TWO_WAY,
        (2.0, 1.09, 1.0): Route.TWO_WAY,
        (2.0, 1.11, 1.0): Route.REDUCE,
    }.items():
        assert best_way(dict(zip(ways, seconds, strict=True))) == best


def test_only_auto_among_more_than_two_sites_measures():
    assert not og.RankDAD().compressor().wants_link(2)
    assert og.RankDAD().compressor().wants_link(3)
    for method in (og.RankDAD(reduce="two_way"), og.PowerSGD(), og.DAD()):
        assert not method.compressor().wants_link(3)


def test_coverage_says_what_was_chosen():
    def body(rank, group):
        replica = model()
        session = og.distribute(replica, og.RankDAD(rank=2), group=group)
        backward(replica, batch(rank, 0, 40))
        return {line.parameter: line.why for line in session.coverage()}

    first, *others = run_on_lasting_groups(3, body)
    assert 'reduce="auto": ' in first["0.weight"]
    assert all(other == first for other in others)
