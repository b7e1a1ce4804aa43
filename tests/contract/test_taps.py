"""A tap hears all that leaves a site, by every method, and changes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_all_methods import METHODS, batch
from torch import Tensor, nn

import outergrad as og
from asking import SITES, network
from cases import Boom
from meshes import run_mesh
from outergrad.core.sent import Kind, Sent, Way, copied
from outergrad.tools.audit.view import summed, view_of
from ranks import run_on_lasting_groups
from stars import on_star

STEPS = 3
ORIGINAL = network()
LOCAL = {
    f"local steps, {name}": og.LocalSteps(2, method=method)
    for name, method in {
        "dense": og.Dense(),
        "rank-dad": og.RankDAD(rank=2),
        "sparse": og.Sparse(density=0.1),
    }.items()
}
ALL = {"dense": og.Dense(), **METHODS, **LOCAL}


class Heard:
    """A tap that keeps what it hears, and of which step."""

    def __init__(self) -> None:
        self.kept: list[Sent] = []
        self.told: list[tuple[str, int]] = []
        self.run: Any = None

    def sent(self, sent: Sent) -> None:
        self.kept.append(copied(sent))

    def attached(self, run: Any) -> None:
        self.run = run

    def begun(self, step: int) -> None:
        self.told.append(("begun", step))

    def ended(self, step: int) -> None:
        self.told.append(("ended", step))


class Plain:
    """A tap with nothing but what it needs."""

    def __init__(self) -> None:
        self.kept: list[Sent] = []

    def sent(self, sent: Sent) -> None:
        self.kept.append(copied(sent))


def trained(method: Any, rank: int, tap: Any, **where: Any) -> tuple[list[dict[str, Tensor]], int]:
    """Weights after each step, and the bytes that it took."""
    model, found = copy.deepcopy(ORIGINAL), []
    session = og.distribute(model, copy.deepcopy(method), tap=tap, **where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    session.flush()
    sent_bytes = session.stats().total_sent_bytes
    session.detach()
    return found, sent_bytes


@pytest.mark.parametrize("name", ALL)
def test_a_tap_changes_no_byte_and_no_weight(name):
    def body(rank, group):
        tap = Heard()
        heard = trained(ALL[name], rank, tap, group=group)
        alone = trained(ALL[name], rank, None, group=group)
        assert heard[1] == alone[1]
        for one, other in zip(heard[0], alone[0], strict=True):
            assert all(torch.equal(one[n], other[n]) for n in one)
        assert tap.kept
        steps = [step for what, step in tap.told if what == "ended"]
        assert steps == sorted(set(steps))
        assert {one.step for one in tap.kept} == set(steps)

    run_on_lasting_groups(SITES, body)


def heard(method: Any, rank: int, tap: Any, **where: Any) -> dict[str, Tensor]:
    """The mean gradients of a step, of which the tap has heard alone."""
    model = copy.deepcopy(ORIGINAL)
    session = og.distribute(model, copy.deepcopy(method), tap=tap, **where)
    for step in range(2):
        tap.kept.clear()
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
    session.detach()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_heard(found: list[tuple[list[Sent], dict[str, Tensor]]], sites: int) -> None:
    """That the gradients which arrived are those that all taps together have heard of."""
    params = dict(ORIGINAL.named_parameters())
    mean = summed([view_of(sent, params) for sent, _ in found]).gradients
    merged = [one for sent, _ in found for one in sent if one.kind == Kind.MERGED]
    owners = view_of([replace(one, kind=Kind.GRADIENT) for one in merged], params).gradients
    blocks = [one.name for sent, _ in found for one in sent if isinstance(one.content, list)]
    for name, arrived in found[0][1].items():
        if name in owners:
            assert close(owners[name], arrived), name
        elif name in mean:
            assert close(mean[name] / sites, arrived), name
        else:
            assert any(name.startswith(block) for block in blocks), name


def close(found: Tensor, wanted: Tensor) -> bool:
    return float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


@pytest.mark.parametrize("name", [name for name in ALL if name not in LOCAL])
def test_what_taps_hear_is_what_arrives(name):
    def body(rank, group):
        tap = Plain()
        return tap.kept, heard(ALL[name], rank, tap, group=group)

    assert_heard(run_on_lasting_groups(SITES, body), SITES)


@pytest.mark.parametrize("name", ["dense", "dad", "rank-dad, two-way", "rank-dad, all-reduced"])
@pytest.mark.parametrize("blind", [False, True])
def test_it_hears_the_same_around_a_hub(name, blind):
    def body(rank, star):
        tap = Plain()
        return tap.kept, heard(ALL[name], rank, tap, transport=star)

    found = on_star(2, body, {"blind": blind})
    if blind:  # sums are rounded to a unit on their way
        assert {one.name for one in found[0][0]} >= {"3.weight"}
    else:
        assert_heard(found, 2)


@pytest.mark.parametrize("name", ["dense", "dad", "rank-dad, two-way", "rank-dad, all-reduced"])
def test_on_a_mesh_each_rank_hears_its_share(name):
    def body(mesh):
        tap = Plain()
        return tap.kept, heard(ALL[name], mesh.number, tap, mesh=mesh)

    found = run_mesh(2, 2, body)
    shares = [{one.name for one in sent if one.kind == Kind.GRADIENT} for sent, _ in found[:2]]
    assert not shares[0] & shares[1]
    sites = [([*a, *b], grads) for (a, grads), (b, _) in (found[:2], found[2:])]
    assert_heard(sites, 2)


def test_a_tap_of_whole_steps_is_refused_on_a_mesh_by_all_ranks():
    def body(mesh):
        with pytest.raises(ValueError, match="asks for whole steps"):
            og.distribute(copy.deepcopy(ORIGINAL), og.Dense(), mesh=mesh, tap=Heard())

    run_mesh(2, 2, body)


def test_local_steps_tell_changes_and_the_weights_they_begin_at():
    def body(rank, group):
        tap, model = Heard(), nn.Linear(3, 2)
        session = og.distribute(model, og.LocalSteps(2), group=group, tap=tap)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        at_begin = {n: p.detach().clone() for n, p in tap.run.weights.items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moved = dict(before)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(rank, step)[..., :3]).square().mean().backward()
            moved = {n: moved[n] - 0.1 * p.grad for n, p in model.named_parameters()}
            optimizer.step()
        session.detach()
        assert tap.run.local_steps == 2
        assert all(torch.equal(before[n], at_begin[n]) for n in before)
        found = view_of(tap.kept, dict(model.named_parameters())).gradients
        for n, change in found.items():
            torch.testing.assert_close(change, before[n] - moved[n])

    run_on_lasting_groups(2, body)


def test_owners_and_the_means_that_they_send_are_told():
    method = og.RankDAD(rank=2, reduce="two_way", error_feedback=None)

    def body(rank, group):
        tap = Plain()
        heard(method, rank, tap, group=group)
        return tap.kept

    sent_S = run_on_lasting_groups(SITES, body)
    owner_of = {one.name: one.owner for one in sent_S[0] if one.way == Way.OWNED}
    assert {*owner_of.values()} <= {*range(SITES)}
    for rank, sent in enumerate(sent_S):
        assert {o.name: o.owner for o in sent if o.way == Way.OWNED} == owner_of
        merged = {o.name for o in sent if o.kind == Kind.MERGED}
        assert merged == {name for name, owner in owner_of.items() if owner == rank}


@pytest.mark.parametrize(("buffers", "senders"), [("broadcast", 1), ("mean", 2), ("local", 0)])
def test_running_statistics_are_told_where_they_travel(buffers, senders):
    def body(rank, group):
        tap = Plain()
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        session = og.distribute(model, og.Dense(), group=group, tap=tap, buffers=buffers)
        start = model[1].running_mean.clone()
        y = model[0](batch(rank, 0)[:, 0, :3])
        model(batch(rank, 0)[:, 0, :3]).square().mean().backward()
        session.detach()
        return start + 0.1 * (y.mean(0) - start), tap.kept

    found = run_on_lasting_groups(2, body)
    told = [{one.name: one.content for one in sent if one.kind == Kind.BUFFER} for _, sent in found]
    assert sum("1.running_mean" in one for one in told) == senders
    for (own, _), one in zip(found, told, strict=True):
        if "1.running_mean" in one:
            torch.testing.assert_close(one["1.running_mean"], own)


def test_of_a_step_that_does_not_count_the_begin_alone_is_told():
    def body(rank, group):
        tap, model = Heard(), nn.Linear(3, 2)
        session = og.distribute(model, og.Dense(), group=group, tap=tap)
        x = torch.ones(2, 3)
        with pytest.raises((ArithmeticError, og.StepDiscardedError)):
            Boom.apply(model(x).sum(), rank == 0).backward()
        model.zero_grad()
        model(x).sum().backward()
        session.detach()
        return tap.told

    for told in run_on_lasting_groups(2, body):
        assert [what for what, _ in told] == ["begun", "begun", "ended"]
        assert told[-1][1] == told[-2][1]


def test_a_tap_that_raises_is_dropped_and_the_training_goes_on():
    class Broken:
        def __init__(self) -> None:
            self.calls = 0

        def sent(self, sent: Sent) -> None:
            self.calls += 1
            raise OSError("the disk is full")

    def body(rank, group):
        tap, model = Broken(), nn.Linear(3, 2)
        session = og.distribute(model, og.Dense(), group=group, tap=tap if rank == 0 else None)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
        session.detach()
        return tap.calls, model.weight.grad

    with pytest.warns(UserWarning, match="the tap Broken failed and is dropped.*disk is full"):
        (calls, found), (_, other) = run_on_lasting_groups(2, body)
    assert calls == 1
    assert torch.equal(found, other)


@pytest.mark.parametrize("wrong", [Plain, object(), print, "file.pt"])
def test_a_wrong_tap_is_refused_on_all_sites(wrong):
    def body(rank, group):
        with pytest.raises((TypeError, ValueError), match="tap"):
            og.distribute(nn.Linear(2, 2), og.Dense(), group=group, tap=wrong if rank else None)

    run_on_lasting_groups(2, body)


def test_deltas_below_a_shared_part_are_told():
    """Those of both sites have the mean that flows on into a part of each site's own."""
    method = og.PerLayer({"0.*": og.Local(), "*": og.Dense()}, joint=True)

    def body(rank, group):
        tap, model = Plain(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        session = og.distribute(model, method, group=group, tap=tap)
        x = batch(rank, 0)[:, 0, :3]
        model(x).square().mean().backward()
        session.detach()
        (delta,) = [one.content for one in tap.kept if one.kind == Kind.DELTAS]
        return delta, x, model[0].weight.grad

    (mine, x, grad), (other, _, _) = run_on_lasting_groups(2, body)
    torch.testing.assert_close(grad, ((mine + other) / 2).T @ x)
