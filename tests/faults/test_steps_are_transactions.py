"""A step counts on every site that is left, or on none; what is damaged is never applied."""

from __future__ import annotations

import copy
import math
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from faulty import Died, own_comm
from torch import nn
from torch.optim import Adam

import outergrad as og
from cases import METHODS, Boom, mlp, relative_error
from covering import covering
from patience import distribute_then_hurry
from ranks import run_on_lasting_groups, run_ranks

TABLE = METHODS | {
    "rank-dad, two ways": og.RankDAD(rank=1000, reduce="two_way"),
    "rank-dad, all_reduce": og.RankDAD(rank=1000, reduce="all_reduce"),
    "rank-dad, rank 2": og.RankDAD(rank=2),
    "rank-dad, sides in turn": og.RankDAD(rank=2, reduce="alternate"),
    "sparse, a tenth": og.Sparse(density=0.1, always=True),
    "edad blocks": og.EDAD(blocks=["0"], inputs="raw", always=True),
}
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(s)) for s in range(4)]
torch.manual_seed(3)
MODEL = nn.Sequential(mlp(6, 24, 24), nn.LayerNorm(24), nn.Linear(24, 5))
FEW = ["dense", "dad", "rank-dad, two ways", "rank-dad, all_reduce", "edad blocks"]
VOTED = ["sparse, all added up", "edad blocks", "edad forced", "edad raw forced"]
"""What must not be applied before all sites have said that they have it."""
LATE_SUMS = ["dense", "powersgd, full rank"]
SUMS = ["dense", "powersgd, full rank", "sparse, all added up"]
"""Of two sites that have different sums, nobody can say which one is right."""
INEXACT = ("rank-dad, rank 2", "rank-dad, sides in turn", "sparse, a tenth")
EXACT = [name for name in TABLE if name not in INEXACT]


@pytest.fixture(params=TABLE)
def method(request):
    return TABLE[request.param]


def backward(model: nn.Module, rank: int, step: int = 0, factor: float = 1.0) -> None:
    model.zero_grad()
    (factor * (model(BATCHES[rank] + 0.1 * step) ** 2).mean()).backward()


def pooled(sites: int, step: int = 0) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(MODEL).double()
    for x in BATCHES[:sites]:
        ((model(x.double() + 0.1 * step) ** 2).mean() / sites).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_right(model: nn.Module, sites: int, step: int) -> None:
    expected = pooled(sites, step)
    for name, p in model.named_parameters():
        assert relative_error(p.grad, expected[name]) < 5e-6, name


def flip(parts: list[torch.Tensor], sender: int) -> None:
    """One bit of a message or of a sum."""
    part = parts[min(sender, len(parts) - 1)]
    part.view(-1).view(torch.uint8)[part.nbytes * 2 // 3] ^= 4


# -- damaged messages -----------------------------------------------------------------------------


def last_of_site_0(sites):
    """The last site receives the first message of site 0, or the first sum, with another bit."""

    def change(rank, index, parts):
        if rank == sites - 1 and index == 0:
            flip(parts, 0)

    return staticmethod(change)


LATE_GATHERED = [name for name in EXACT if name not in (*VOTED, *LATE_SUMS)]


@pytest.mark.parametrize(("name", "sites"), covering(LATE_GATHERED, [2, 3], quick=4, every=2))
def test_a_damaged_message_is_sent_again(faulty, name, sites):
    """The others may have applied the step: so it counts on the site that refused one, too."""
    faulty.change = last_of_site_0(sites)

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, TABLE[name], group=group)
        for step in range(6):
            own_comm().armed = step == 3
            backward(model, rank, step)
            assert_right(model, sites, step)
        seen = own_comm().seen
        session.detach()
        return seen

    assert min(run_on_lasting_groups(sites, body)) > 0


@pytest.mark.parametrize(("name", "sites"), covering(LATE_SUMS, [2, 3]))
def test_a_damaged_sum_is_found_a_step_later(faulty, name, sites):
    """All have applied it by then. All raise the same, and go on once they are equal again."""
    faulty.change = last_of_site_0(sites)

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, TABLE[name], group=group)
        for step in range(4):
            own_comm().armed = step == 3
            backward(model, rank, step)
        own_comm().armed = False
        with pytest.raises(og.DriftError) as caught:
            backward(model, rank, 4)
        assert all(p.grad is None for p in model.parameters())
        session.make_equal()
        backward(model, rank, 5)
        assert_right(model, sites, 5)
        session.detach()
        return str(caught.value), caught.value.sites, caught.value.step

    found = run_on_lasting_groups(sites, body)
    assert len(set(found)) == 1
    assert found[0][1:] == ((2,) if sites == 3 else (0, 1), 4)
    assert "step 3, which sites have applied" in found[0][0]
    assert "Step 4 was not applied on any site" in found[0][0]


@pytest.mark.parametrize("when", ["state_dict", "flush", "detach"])
def test_a_damaged_sum_of_the_last_step_is_found_when_the_session_settles(faulty, when):
    faulty.change = last_of_site_0(2)

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.Dense(), group=group)
        own_comm().armed = True
        backward(model, rank)
        own_comm().armed = False
        with pytest.raises(og.DriftError, match="different messages or sums in step 0"):
            getattr(session, when)()
        session.detach()

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize(("name", "sites"), covering(VOTED, [2, 3], quick=2, every=2))
def test_a_damaged_message_is_refused_by_all_sites(faulty, name, sites):
    """The last site receives one message of site 0 with another bit."""
    faulty.change = last_of_site_0(sites)

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, TABLE[name], group=group)
        for step in range(3):
            backward(model, rank, step)
        own_comm().armed = True
        with pytest.raises(og.StepDiscardedError) as caught:
            backward(model, rank, 3)
        assert all(p.grad is None for p in model.parameters())
        own_comm().armed = False
        two = "sites 0, 1 received different" if name in SUMS and sites == 2 else None
        assert (two or f"site {sites - 1} re") in str(caught.value)
        backward(model, rank, 4)
        assert_right(model, sites, 4)
        session.detach()

    run_on_lasting_groups(sites, body)


def another_step(rank, index, parts):
    """Site 1 reads of another step in what site 0 sent."""
    if rank == 1:
        parts[0][2] += 1


def test_a_damaged_header_ends_the_group(faulty):
    faulty.change, faulty.kind = staticmethod(another_step), "header"

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        og.distribute(model, group=group)
        own_comm().armed = True
        with pytest.raises(og.SiteLostError):
            backward(model, rank)
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(og.SiteLostError):
            backward(model, rank)
        with pytest.raises(og.SiteLostError):
            og.distribute(copy.deepcopy(MODEL), group=group)

    run_ranks(2, body)


def test_a_damaged_vote_ends_the_group_behind_the_step(faulty):
    """It is read a step later; the site that cannot read it makes that step as the other does."""
    faulty.change, faulty.kind = staticmethod(another_step), "vote"

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        og.distribute(model, group=group)
        own_comm().armed = True
        for step in range(2):
            backward(model, rank, step)
            assert_right(model, 2, step)
        with pytest.raises(og.SiteLostError) as caught:
            backward(model, rank)
        return caught.value.step

    assert run_ranks(2, body) == [2, 2]


# -- lost sites -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "foreseen", "heard_by"),
    covering(FEW, [True, False], [(), (0,), (1,), (0, 1)], quick=4, every=2),
)
def test_all_sites_that_are_left_have_made_the_same_steps(
    faulty, monkeypatch, name, heard_by, foreseen
):
    """The third site dies while it votes; its last vote reaches none, one or both of the others.

    Where they do not wait for the vote, they have applied the step. Otherwise, where one has heard
    it, the other one learns from that whether the step counts.
    """
    monkeypatch.setattr("outergrad.commit.agreement.ANSWERS_S", 1.0)
    last = 4 if foreseen else 1

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        optimizer = Adam(model.parameters(), lr=0.01)
        og.distribute(model, TABLE[name], group=group)
        for step in range(8):
            if rank == 2 and step == last:
                own_comm().dies_after_vote_to = heard_by
            try:
                backward(model, rank, step)
            except (og.SiteLostError, Died) as raised:
                return raised, list(model.parameters())
            optimizer.step()
        raise AssertionError("nobody noticed")

    (error, params), (other_error, other_params), _ = run_ranks(3, body)
    assert error.sites == other_error.sites == (2,)
    assert error.step == other_error.step
    late = name not in VOTED
    assert error.step in ((last + 1,) if late else (last, last + 1) if heard_by else (last,))
    for p, q in zip(params, other_params, strict=True):
        assert torch.equal(p, q)
        assert p.grad is q.grad is None


@pytest.mark.parametrize(("name", "sites"), covering(FEW, [2, 3], quick=2, every=2))
def test_a_site_that_hangs_is_named_within_the_timeout(name, sites):
    def body(rank, group):
        model = copy.deepcopy(MODEL)
        distribute_then_hurry(model, TABLE[name], group=group)
        backward(model, rank)
        if rank == sites - 1:
            time.sleep(3.0)
        began = time.monotonic()
        with pytest.raises(og.SiteLostError, match="lost site") as caught:
            backward(model, rank, 1)
        assert time.monotonic() - began < 1.0 + 2.0
        return caught.value.sites if rank != sites - 1 else str(caught.value)

    *others, late = run_ranks(sites, body)
    assert others == [(sites - 1,)] * (sites - 1)
    assert "waited for this one until the timeout, and gave up" in late or "closed" in late


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta()])
def test_a_timeout_is_above_zero(timeout):
    def body(rank, group):
        with pytest.raises(ValueError, match="timeout="):
            og.distribute(copy.deepcopy(MODEL), group=group, timeout=timeout)

    run_on_lasting_groups(1, body)


# -- gradients that are not finite ----------------------------------------------------------------


class Events:
    """Keeps mishaps."""

    every = 1000

    def __init__(self):
        self.mishaps = []

    def record(self, event):
        if isinstance(event, og.events.Mishap):
            self.mishaps.append(event)


@pytest.mark.parametrize(("method", "sites"), covering(TABLE, [1, 2, 3], quick=6, every=3))
def test_a_bad_step_is_skipped_on_all_sites(method, sites):
    bad = math.inf if sites == 3 else math.nan

    def body(rank, group):
        model, events = copy.deepcopy(MODEL), Events()
        optimizer = Adam(model.parameters(), lr=0.01)
        options = {"max_bad_steps": 1, "recorder": events}
        session = og.distribute(model, method, group=group, **options)
        for step in range(6):
            before = [p.detach().clone() for p in model.parameters()]
            state = copy.deepcopy(optimizer.state_dict())
            factor = bad if step in (3, 5) and rank == sites - 1 else 1.0
            backward(model, rank, step, factor)
            optimizer.step()
            if step in (3, 5):
                assert all(p.grad is None for p in model.parameters())
                assert all(map(torch.equal, before, model.parameters()))
                assert str(state) == str(optimizer.state_dict())
        assert [(m.what, m.step, m.sites) for m in events.mishaps] == [
            ("skipped", 3, (sites - 1,)),
            ("skipped", 5, (sites - 1,)),
        ]
        assert all(m.layer in dict(model.named_parameters()) for m in events.mishaps)
        with pytest.raises(og.BadStepsError, match=f"on site {sites - 1} has NaN") as caught:
            backward(model, rank, 6, bad if rank == sites - 1 else 1.0)
        assert (caught.value.site, caught.value.step) == (sites - 1, 6)
        backward(model, rank, 7)
        session.detach()
        return [p.grad for p in model.parameters()]

    first, *others = run_on_lasting_groups(sites, body)
    for other in others:
        assert all(map(torch.equal, first, other))
    assert all(grad.isfinite().all() for grad in first)


def test_the_layer_is_named_that_a_nan_arose_in():
    """Only the last layer's gradient is not finite: the delta below it is cut to zero."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, delta):
            return torch.zeros_like(delta)

    def body(rank, group):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        og.distribute(model, group=group, max_bad_steps=0)
        y = model[1](Cut.apply(model[0](BATCHES[rank])))
        with pytest.raises(
            og.BadStepsError, match=r"'1\.(weight|bias)' on site 1 has NaN"
        ) as caught:
            (y.sum() * (math.nan if rank == 1 else 1.0)).backward()
        assert caught.value.layer.startswith("1.")

    run_on_lasting_groups(2, body)


def test_without_a_limit_nan_goes_where_it_goes_with_ddp(method):
    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, method, group=group)
        backward(model, rank, 0, math.nan if rank == 1 else 1.0)
        assert all(p.grad.isnan().any() for p in model.parameters())
        session.detach()

    run_on_lasting_groups(2, body)


def test_a_step_that_raised_is_told_of():
    def body(rank, group):
        model, events = mlp(6, 8, 5), Events()
        og.distribute(model, group=group, recorder=events)
        with suppress(ArithmeticError, og.StepDiscardedError):
            model[1:](Boom.apply(model[0](BATCHES[rank]), rank == 1)).sum().backward()
        backward(model, rank)
        assert [(m.what, m.sites) for m in events.mishaps] == [("discarded", (1,))]

    run_on_lasting_groups(2, body)
