"""What recorders hear when not all goes as usual, and that a training goes on whatever they do."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import outergrad as og
from cases import Boom, Events
from outergrad.events import End, Run, Scalars
from outergrad.record.gauge import Sums
from ranks import run_on_lasting_groups, run_ranks, try_ranks


def steps_of(events):
    return [event.step for event in events if isinstance(event, og.events.Step)]


def test_a_gradient_that_cancels_has_no_direction():
    """Equal rows whose deltas add up to nothing: rounding leaves a square of either sign."""

    def body(rank, group):
        torch.manual_seed(rank)
        net, events = nn.Linear(64, 64, bias=False), Events()
        method = og.DAD(always=True, reveal="activations")
        session = og.distribute(net, method, group=group, recorder=events)
        for _ in range(12):
            x = torch.randn(1, 64).expand(16, 64) if rank == 0 else torch.randn(16, 64)
            y = net(x)
            net.zero_grad()
            ((y - y.mean(0)) * torch.randn(16, 64)).sum().backward()
        session.detach()
        return events.layers

    ours, theirs = run_on_lasting_groups(2, body)
    assert all(event.gradient_norm == 0 and event.cosine is None for event in ours)
    assert all(0.9 < event.cosine <= 1 for event in theirs)


@pytest.mark.parametrize("own", [-1e-9, 0.0, 1e-180, math.nan])
def test_no_square_is_too_small(own):
    sums = Sums(own=own, mean=own, both=1e-9)
    found = sums.measured()
    assert "cosine" not in found or math.isnan(found["cosine"]) or abs(found["cosine"]) <= 1


def test_a_step_that_was_discarded_is_not_told():
    def body(rank, group):
        net, events = nn.Linear(4, 3), Events()
        session = og.distribute(net, og.DAD(always=True), group=group, recorder=events)
        for step in range(4):
            x = torch.ones(2, 4, requires_grad=True)
            try:
                net(Boom.apply(x, step == 2 and rank == 0)).sum().backward()
            except (ArithmeticError, og.StepDiscardedError):
                net.zero_grad()
        session.detach()
        return events

    for events in run_on_lasting_groups(2, body):
        assert steps_of(events) == [0, 1, 3]
        assert {event.step for event in events.layers} == {0, 1, 3}


@pytest.mark.parametrize("sites", [1, 2])
@pytest.mark.parametrize(
    "method", [og.Dense(every=2), og.DAD(always=True, every=2), og.RankDAD(rank=2, every=2)]
)
def test_what_is_a_mean_over_passes_is_told_as_such(method, sites):
    def body(rank, group):
        torch.manual_seed(0)
        net, events, norms = nn.Linear(8, 6), Events(), []
        session = og.distribute(net, method, group=group, recorder=events)
        for step in range(4):
            net.zero_grad()
            net(torch.randn(3, 8) + step + rank).square().mean().backward()
            if step % 2:
                norms.append(net.weight.grad.norm().item())
        session.detach()
        return [e for e in events.layers if e.layer == "weight"], norms

    for layers, norms in run_on_lasting_groups(sites, body):
        assert [event.mean_norm for event in layers] == pytest.approx(norms, rel=1e-3)
        for event, expected in zip(layers, norms, strict=True):
            root = math.sqrt(sum(sigma**2 for sigma in event.singular_values))
            assert root == pytest.approx(expected, rel=0.02)


def test_a_gradient_that_is_not_complete_is_not_told():
    """A penalty on a weight comes on top of what its factors give; known in the first step."""

    def body(rank, group):
        torch.manual_seed(0)
        net, events, norms = nn.Linear(8, 6), Events(), []
        session = og.distribute(net, og.DAD(always=True), group=group, recorder=events)
        for _ in range(3):
            net.zero_grad()
            (net(torch.randn(3, 8)).square().mean() + net.weight.square().sum()).backward()
            norms.append(net.weight.grad.norm().item())
        session.detach()
        return [e.mean_norm for e in events.layers if e.layer == "weight"], norms

    for told, norms in run_on_lasting_groups(2, body):
        assert told[0] is None
        assert told[1:] == pytest.approx(norms[1:], rel=1e-4)


def test_where_warnings_are_errors_training_goes_on():
    class Full:
        def record(self, event):
            raise OSError("disk full")

        def __repr__(self):
            raise RuntimeError("no name")

    def body(rank, group):
        net = nn.Linear(4, 3)
        og.distribute(net, group=group, recorder=Full() if rank else None)
        for _ in range(2):
            net(torch.ones(2, 4)).sum().backward()
        return net.weight.grad

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = run_ranks(2, body)
    assert first.equal(second)


def test_loading_begins_another_run():
    def body(rank, group):
        net, events = nn.Linear(4, 3), Events()
        session = og.distribute(net, group=group, recorder=events)

        def train(steps):
            for _ in range(steps):
                net(torch.ones(2, 4)).sum().backward()

        train(2)
        saved = copy.deepcopy(session.state_dict())
        train(2)
        session.load_state_dict(saved)
        train(1)
        session.detach()
        return [
            (type(event).__name__, event.step) for event in events if event not in events.layers
        ]

    for told in run_on_lasting_groups(2, body):
        begun = [[("Run", step), ("Step", step), ("Disclosure", step)] for step in (0, 2)]
        steps = [("Step", step) for step in (1, 2, 3)]
        assert told == [*begun[0], *steps, *begun[1], ("End", 3)]


def test_earlier_passes_of_a_single_site_count():
    def body(rank, group):
        net, events = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), Events()
        session = og.distribute(net, og.Dense(every=2), group=group, recorder=events)
        for layer in net:
            layer(torch.ones(1, 3)).sum().backward()
        session.detach()
        return {event.layer for event in events.layers}

    assert run_on_lasting_groups(1, body) == [{"0.weight", "0.bias", "1.weight", "1.bias"}]


def test_a_file_for_every_rank(tmp_path):
    recorder = og.JSONL(tmp_path)
    for rank in (0, 1, 0):
        recorder.record(Scalars(rank=rank, step=0, time=0.0, values={}))
    recorder.close()
    lines = [len((tmp_path / f"site-{rank}.jsonl").read_text().splitlines()) for rank in (0, 1)]
    assert lines == [2, 1]


@pytest.mark.parametrize("budget", [None, 0, -1, "much", math.nan])
def test_a_budget_is_checked_on_all_sites(budget):
    class Ours(Events):
        pass

    Ours.budget = budget

    def body(rank, group):
        og.distribute(nn.Linear(3, 2), group=group, recorder=Ours() if rank else None)

    for error in try_ranks(2, body):
        assert f"budget={budget!r}" in str(error)


def test_the_first_event_is_the_run():
    def body(rank, group):
        events = Events()
        session = og.distribute(nn.Linear(3, 2), group=group, recorder=events)
        session.log(loss=1)
        session.detach()
        return events

    for events in run_on_lasting_groups(2, body):
        assert [type(event) for event in events] == [Run, Scalars, End]
