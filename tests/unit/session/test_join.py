"""Unequal numbers of batches per site: nobody hangs, and all replicas end equal."""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

import outergrad as og
from cases import Boom
from covering import covering
from loops import METHODS, SOME, assert_close, batch, loss_of, net, pooled
from outergrad.launch.simulate import gloo_group
from ranks import TIMEOUT, run_on_lasting_groups, run_ranks, try_ranks

pytestmark = pytest.mark.usefixtures("large_matrices")

COUNTS = (2, 4, 0)
"""Batches of each site; the last has none."""


@pytest.fixture(params=SOME)
def method(request):
    return (
        METHODS.get(request.param, request.param)
        if isinstance(request.param, str)
        else request.param
    )


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3, eps=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def active(k: int, counts=COUNTS) -> list[int]:
    return [site for site, count in enumerate(counts) if k < count]


def expected(counts=COUNTS, make=adam) -> list[Tensor]:
    """Trained on what the sites have that still have a batch."""
    batches = [
        [(1 / len(active(k, counts)), batch(site, k, 2)) for site in active(k, counts)]
        for k in range(max(counts))
    ]
    return pooled(step, batches, make)


def loop(session, model, optimizer, count, rank, *, first=0):
    for k in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, batch(rank, k, 2)).backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = optimizer.state_dict()["state"]
    moments = [t for k in sorted(found) for t in found[k].values() if isinstance(t, Tensor)]
    return [*(p.detach().clone() for p in model.parameters()), *(t.clone() for t in moments)]


def assert_same(found: list[list[Tensor]]) -> None:
    for other in found[1:]:
        assert len(other) == len(found[0])
        assert all(torch.equal(p, q) for p, q in zip(found[0], other, strict=True))


def test_sites_that_run_out_take_part_until_all_have(method):
    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, method, group=group)
        with session.join(step=optimizer.step):
            loop(session, model, optimizer, COUNTS[rank], rank)
        assert session.stats().step == max(COUNTS)
        return state_of(model, optimizer)

    found = run_on_lasting_groups(3, body)
    assert_same(found)
    assert_close(found[0][: len(list(net().parameters()))], expected(), 2e-4)


def no_copies(monkeypatch) -> None:
    """The states must be equal by themselves."""

    def refused(*_: Any) -> Any:
        raise AssertionError("the replicas were not equal")

    monkeypatch.setattr("outergrad.session.made_equal._sent", refused)


@pytest.mark.parametrize(
    ("method", "given"), covering(METHODS, {"step=": True, "seen": False}, quick=4)
)
def test_optimizers_go_along_by_themselves(method, given, monkeypatch):
    """Nothing is copied in the end; and the loop goes on after it, also with all at once."""
    no_copies(monkeypatch)
    counts = (1, 3)

    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, method, group=group)
        for first, count in ((0, counts[rank]), (3, 2), (5, 1 + rank)):
            with session.join(step=optimizer.step if given else None):
                loop(session, model, optimizer, count, rank, first=first)
        loop(session, model, optimizer, 3, rank, first=7)
        return state_of(model, optimizer)

    assert_same(run_on_lasting_groups(2, body))


def test_a_site_without_any_batch_learns_what_was_seen_before(monkeypatch):
    no_copies(monkeypatch)

    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, og.DAD(), group=group)
        for count in (2, 2 * rank, 1):
            with session.join():
                loop(session, model, optimizer, count, rank)
        return state_of(model, optimizer)

    assert_same(run_on_lasting_groups(2, body))


def test_what_cannot_go_along_is_copied_from_who_was_active_last():
    """A schedule of which the session knows nothing, and an optimizer with settings of its own."""
    counts = (1, 4, 2)

    def body(rank, group):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        session = og.distribute(model, og.DAD(), group=group)
        with session.join():
            for k in range(counts[rank]):
                loop(session, model, optimizer, 1, rank, first=k)
                schedule.step()
        return [torch.tensor(optimizer.param_groups[0]["lr"]), *state_of(model, optimizer)]

    found = run_on_lasting_groups(3, body)
    assert_same(found)
    assert found[0][0] == pytest.approx(0.1 * 0.5**4)


def test_an_optimizer_that_was_never_seen_is_named():
    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, og.DAD(), group=group)
        with session.join():
            loop(session, model, optimizer, 2 * rank, rank)
        return [p.detach().clone() for p in model.parameters()]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(run_on_lasting_groups(2, body))
    assert ["first.weight" in str(w.message) for w in caught] == [True]


def test_running_out_together_costs_headers_once():
    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, og.DAD(), group=group)
        with session.join():
            loop(session, model, optimizer, 3, rank)
            before = session.stats().total_sent_bytes
            inside = session._at.comm.sent_bytes
        header, digests = 64 * 8, 5 * 8
        assert session._at.comm.sent_bytes - inside == 2 * (header + digests)
        assert session.stats().total_sent_bytes == before
        return session.stats().step

    assert run_on_lasting_groups(3, body) == [3] * 3


def test_nobody_has_a_batch():
    def body(rank, group):
        session = og.distribute(net(), og.DAD(), group=group)
        with session.join():
            pass
        return session.stats().step

    assert run_on_lasting_groups(2, body) == [0, 0]


def test_weights_are_those_of_the_samples_of_active_sites(method):
    rows, counts = (1, 3), (1, 3)

    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, method, group=group, weighting="samples")
        with session.join():
            for k in range(counts[rank]):
                optimizer.zero_grad()
                loss_of(model, batch(rank, k, rows[rank])).backward()
                optimizer.step()
        return state_of(model, optimizer)

    batches = [
        [(1.0, torch.cat([batch(site, k, rows[site]) for site in active(k, counts)]))]
        for k in range(max(counts))
    ]
    found = run_on_lasting_groups(2, body)
    assert_same(found)
    count = len(list(net().parameters()))
    assert_close(found[0][:count], pooled(step, batches, adam), 2e-4)


def test_accumulation_inside(method):
    """The rest of a site whose loop ends between two shared steps is dropped."""
    passes = (3, 6)

    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, method, group=group)
        with session.join():
            for k in range(passes[rank]):
                if k % 2 == 0:
                    optimizer.zero_grad()
                    with session.no_sync():
                        loss_of(model, batch(rank, k, 1)).backward()
                else:
                    loss_of(model, batch(rank, k, 1)).backward()
                    optimizer.step()
        return state_of(model, optimizer)

    pairs = [(0, (0, 1)), (2, (1,)), (4, (1,))]
    batches = [
        [(1 / len(sites), batch(s, k + i, 1)) for s in sites for i in (0, 1)] for k, sites in pairs
    ]
    found = run_on_lasting_groups(2, body)
    assert_same(found)
    count = len(list(net().parameters()))
    assert_close(found[0][:count], pooled(step, batches, adam), 2e-4)


def test_scalers_go_along_by_step():
    counts = (1, 3)

    def body(rank, group):
        model, scaler = net(), GradScaler("cpu", init_scale=8.0, growth_interval=2)
        optimizer = adam(model.parameters())
        session = og.distribute(model, og.DAD(always=True), group=group)

        def step():
            scaler.step(optimizer)
            scaler.update()

        with session.join(step=step):
            for k in range(counts[rank]):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, batch(rank, k, 2))).backward()
                step()
        return [torch.tensor(scaler.get_scale()), *state_of(model, optimizer)]

    found = run_on_lasting_groups(2, body)
    assert_same(found)
    assert found[0][0] == 16
    count = len(list(net().parameters()))
    assert_close(found[0][1 : count + 1], expected(counts), 2e-4)


def test_parts_of_each_site_stay_as_they_are():
    """And the states of their optimizers."""

    def body(rank, group):
        model = net()
        with torch.no_grad():
            model.first.weight.mul_(rank + 1)
        optimizer = adam(model.parameters())
        method = og.PerLayer({"first.*": og.Local(), "*": og.DAD()})
        session = og.distribute(model, method, group=group)
        with session.join():
            loop(session, model, optimizer, 1 + 2 * rank, rank)
        local = optimizer.state[model.first.weight]
        shared = [p for name, p in model.named_parameters() if not name.startswith("first")]
        return int(local["step"]), model.first.weight.detach().clone(), shared

    (made, w, p), (other_made, other_w, q) = run_on_lasting_groups(2, body)
    assert (made, other_made) == (1, 3)
    assert not torch.equal(w, other_w)
    assert_same([p, q])


# -- several sessions in one loop -----------------------------------------------------------------


def two_groups(rank: int, sites: int, stores: list[dist.Store]) -> list[dist.ProcessGroup]:
    return [gloo_group(store, rank, sites, TIMEOUT) for store in stores]


ORDERS = {
    "in turns": (1, 1),
    "two of the first": (2, 1),
    "three of the last": (1, 3),
}
"""Steps of the discriminator and of the generator in each round of the loop."""


@pytest.mark.parametrize(("method", "order"), covering(METHODS, ORDERS, quick=6, every=3))
def test_two_sessions_in_one_loop(method, order):
    """As of a GAN: who has run out does not know which of them is stepped next."""
    counts, stores = (1, 3, 0), [dist.HashStore(), dist.HashStore()]

    def body(rank, group):
        models = [net(), net()]
        optimizers = [adam(model.parameters()) for model in models]
        groups = two_groups(rank, 3, stores)
        pairs = zip(models, groups, strict=True)
        sessions = [og.distribute(model, method, group=own) for model, own in pairs]
        with ExitStack() as stack:
            for session, optimizer in zip(sessions, optimizers, strict=True):
                stack.enter_context(session.join(step=optimizer.step))
            for k in range(counts[rank]):
                for model, optimizer, n in zip(models, optimizers, order, strict=True):
                    loop(None, model, optimizer, n, rank, first=n * k)
        found = [state_of(*pair) for pair in zip(models, optimizers, strict=True)]
        for session in sessions:
            session.detach()
        return found

    found = run_ranks(3, body)
    for k, n in enumerate(order):
        assert_same([states[k] for states in found])
        count = len(list(net().parameters()))
        assert_close(found[0][k][:count], expected([n * c for c in counts]), 2e-4)


def test_the_outer_loop_may_go_on_behind_the_inner_one():
    counts, stores = (1, 3), [dist.HashStore(), dist.HashStore()]

    def body(rank, group):
        models = [net(), net()]
        optimizers = [adam(model.parameters()) for model in models]
        groups = two_groups(rank, 2, stores)
        pairs = zip(models, groups, strict=True)
        outer, inner = (og.distribute(model, og.DAD(), group=own) for model, own in pairs)
        with outer.join():
            with inner.join():
                for k in range(counts[rank]):
                    for model, optimizer in zip(models, optimizers, strict=True):
                        loop(None, model, optimizer, 1, rank, first=k)
            loop(None, models[0], optimizers[0], 2 - rank, rank, first=10)
        assert (outer.stats().step, inner.stats().step) == (5, 3)
        found = [state_of(*pair) for pair in zip(models, optimizers, strict=True)]
        outer.detach()
        inner.detach()
        return found

    first, second = run_ranks(2, body)
    assert_same([first[0], second[0]])
    assert_same([first[1], second[1]])


@pytest.mark.parametrize("where", ["loop", "after"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_raise_ends_the_joins_of_all(where, which):
    """Of a loop, or of what a site that has run out does after the steps of the others."""
    stores = [dist.HashStore(), dist.HashStore()]

    def body(rank, group):
        models = [net(), net()]
        optimizers = [adam(model.parameters()) for model in models]
        groups = two_groups(rank, 2, stores)
        pairs = zip(models, groups, strict=True)
        sessions = [og.distribute(model, og.DAD(), group=own) for model, own in pairs]

        def boom():
            raise ArithmeticError("boom")

        def steps():
            with ExitStack() as stack:
                for k, session in enumerate(sessions):
                    raises = where == "after" and rank == 0 and k == which
                    stack.enter_context(session.join(step=boom if raises else None))
                for k in range(1 + 4 * rank):
                    for number, (model, optimizer) in enumerate(
                        zip(models, optimizers, strict=True)
                    ):
                        if where == "loop" and (rank, k, number) == (1, 2, which):
                            boom()
                        loop(None, model, optimizer, 1, rank, first=k)

        raising = 1 if where == "loop" else 0
        with pytest.raises(ArithmeticError if rank == raising else og.StepDiscardedError) as caught:
            steps()
        for session in sessions:
            session.detach()
        return str(caught.value)

    told = run_ranks(2, body, timedelta(seconds=20))
    raising = 1 if where == "loop" else 0
    assert told[raising] == "boom"
    assert f"the loop of site {raising} raised" in told[1 - raising]


# -- by how many sums are divided ----------------------------------------------------------------


@pytest.mark.parametrize("divides_by_all", [False, True])
def test_sums_are_divided_by_the_sites_that_have_a_batch_or_by_all(method, divides_by_all):
    """As DDP does by default, with the option's name there."""

    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, method, group=group)
        with session.join(step=optimizer.step, divide_by_initial_world_size=divides_by_all):
            loop(session, model, optimizer, COUNTS[rank], rank)
        return state_of(model, optimizer)

    batches = [
        [(1 / (3 if divides_by_all else len(active(k))), batch(site, k, 2)) for site in active(k)]
        for k in range(max(COUNTS))
    ]
    found = run_on_lasting_groups(3, body)
    assert_same(found)
    count = len(list(net().parameters()))
    assert_close(found[0][:count], pooled(step, batches, adam), 2e-4)


def test_samples_and_sites_are_not_both_counted():
    def body(rank, group):
        session = og.distribute(net(), og.DAD(), group=group, weighting="samples")
        with (
            pytest.raises(RuntimeError, match="counts sites, and weighting='samples' samples"),
            session.join(divide_by_initial_world_size=True),
        ):
            raise AssertionError("inside")
        session.detach()

    run_on_lasting_groups(2, body)


# -- when something goes wrong --------------------------------------------------------------------


def boom_loss(model: nn.Module, x: Tensor, armed: bool) -> Tensor:
    """Its backward may raise when it has come to the last layer already."""
    hidden = Boom.apply(model.first(x).relu(), armed)
    return (model.last(model.norm(hidden)) ** 2).mean()


@pytest.mark.parametrize("where", ["between steps", "in backward", "in the shadow"])
def test_a_loop_that_raises_ends_all(where):
    """The others do not wait for it: those in the loop and those that are out."""
    counts = {"between steps": (1, 3, 9), "in backward": (1, 3, 9), "in the shadow": (9, 1, 9)}

    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, og.DAD(always=True), group=group)

        def boom():
            raise ArithmeticError("boom")

        @session.join(step=boom if where == "in the shadow" and rank == 1 else None)
        def steps():
            for k in range(counts[where][rank]):
                if rank == 1 and k == 2 and where == "between steps":
                    boom()
                optimizer.zero_grad()
                armed = rank == 1 and k == 2 and where == "in backward"
                boom_loss(model, batch(rank, k, 2), armed).backward()
                optimizer.step()

        with pytest.raises(ArithmeticError if rank == 1 else og.StepDiscardedError) as caught:
            steps()
        with session.join():  # all can go on together
            loop(session, model, optimizer, 1 + rank, rank)
        return str(caught.value)

    told = run_ranks(3, body)
    assert told[1] == "boom"
    if where != "in backward":  # in which those in the loop heard of the step alone
        assert "the loop of site 1 raised" in told[0]
        assert "the loop of site 1 raised" in told[2]


def test_a_backward_that_raises_and_is_caught_ends_nothing():
    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(model, og.DAD(always=True), group=group)
        with session.join():
            for k in range((1, 4, 3)[rank]):
                optimizer.zero_grad()
                try:
                    armed = rank == 1 and k == 2
                    boom_loss(model, batch(rank, k, 2), armed).backward()
                except (ArithmeticError, og.StepDiscardedError):
                    continue
                optimizer.step()
        return state_of(model, optimizer)

    assert_same(run_ranks(3, body))


def test_a_loop_outside_is_told():
    def body(rank, group):
        model = net()
        session = og.distribute(model, og.DAD(), group=group)
        if rank == 0:
            loss_of(model, batch(rank, 0)).backward()
        else:
            with session.join():
                loss_of(model, batch(rank, 0)).backward()

    errors = try_ranks(2, body, timedelta(seconds=5))
    assert all("session.join()" in str(error) for error in errors)


def test_what_cannot_be_joined_is_refused():
    def body(rank, group):
        def refused(match, method, model=None):
            session = og.distribute(model or net(), method, group=group)
            with pytest.raises(RuntimeError, match=match), session.join():
                raise AssertionError("inside")
            return session

        joint = og.PerLayer({"first.*": og.Local(), "*": og.DAD()}, joint=True)
        refused("equal length", joint).detach()
        refused("every=1", og.Dense(every=2)).detach()
        norm = nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2))
        refused("'1' is a SyncBatchNorm", og.DAD(), norm).detach()
        session = refused("LocalSteps", og.LocalSteps(2))
        refused("group of its own", og.DAD()).detach()
        session.detach()
        session = og.distribute(net(), og.DAD(), group=group)
        with session.join(), pytest.raises(RuntimeError, match="already"), session.join():
            pass
        session.detach()
        with pytest.raises(RuntimeError, match="detached"), session.join():
            pass

    run_on_lasting_groups(2, body)


def test_a_single_site_runs_its_loop():
    def body(rank, group):
        model = net()
        optimizer = adam(model.parameters())
        session = og.distribute(copy.deepcopy(model), group=group)
        with session.join():
            loop(session, model, optimizer, 2, rank)
        return True

    assert run_on_lasting_groups(1, body) == [True]
