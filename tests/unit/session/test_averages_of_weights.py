"""Averages of weights in a model (EMA teachers) under `og.LocalSteps`: frozen, and written to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD

import outergrad as og
from ranks import run_on_lasting_groups, try_ranks
from sites_apart import batch, loss, model, plain


class Taught(nn.Module):
    """A student, and a teacher that is an average of it."""

    def __init__(self):
        super().__init__()
        self.student = model()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        y = self.student(x)
        with torch.no_grad():
            z = self.teacher(x)
        return loss(y) + (y - z).square().mean()


def lerped(teacher, student):
    with torch.no_grad():
        teacher.lerp_(student, 0.1)


def past_versions(teacher, student):
    teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def replaced(teacher, student):
    teacher.data = 0.9 * teacher.data + 0.1 * student.data


def train(net, update, rank, numbers):
    optimizer = SGD(net.student.parameters(), lr=0.1)
    for number in numbers:
        optimizer.zero_grad()
        net(batch(rank, number)).backward()
        optimizer.step()
        pairs = zip(net.teacher.parameters(), net.student.parameters(), strict=True)
        for teacher, student in pairs:
            update(teacher, student)


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("update", [lerped, past_versions, replaced])
@pytest.mark.parametrize("settings", [{}, {"stream": 2}, {"overlap": 1}])
def test_teachers_are_equal_behind_each_exchange(update, settings):
    def body(rank, group):
        net = Taught()
        method = og.LocalSteps(4, outer=plain, **settings)
        session = og.distribute(net, method, group=group, verify_every=1)
        train(net, update, rank, range(9))
        session.flush()
        session.detach()
        return weights(net)

    ours, theirs = run_on_lasting_groups(2, body)
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("buffers", ["broadcast", "mean"])
def test_what_teachers_become(buffers):
    """As of buffers: site 0's, or the mean."""

    def alone(rank):
        net = Taught()
        train(net, lerped, rank, range(3))
        return [p.detach() for p in net.teacher.parameters()]

    def body(rank, group):
        net = Taught()
        session = og.distribute(net, og.LocalSteps(50), group=group, buffers=buffers)
        train(net, lerped, rank, range(3))
        session.flush()
        session.detach()
        return [p.detach() for p in net.teacher.parameters()]

    first, second = alone(0), alone(1)
    means = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    for found in run_on_lasting_groups(2, body):
        torch.testing.assert_close(found, first if buffers == "broadcast" else means)


def test_frozen_weights_that_stay_cost_nothing():
    def body(rank, group, net, params):
        session = og.distribute(net, og.LocalSteps(2), group=group)
        optimizer = SGD(params(net), lr=0.1)
        for number in range(4):
            optimizer.zero_grad()
            net(batch(rank, number)).square().mean().backward()
            optimizer.step()
        sent = session.stats().total_sent_bytes
        session.detach()
        return sent

    def with_frozen(rank, group):
        taught = Taught()
        net = nn.Sequential(taught.student, taught.teacher[:1])
        net[1].requires_grad_(False)
        wide = nn.Sequential(net[0], nn.Linear(5, 5).requires_grad_(False))
        return body(rank, group, wide, lambda net: net[0].parameters())

    def without(rank, group):
        return body(rank, group, nn.Sequential(model()), lambda net: net.parameters())

    assert run_on_lasting_groups(2, with_frozen) == run_on_lasting_groups(2, without)


def test_local_averages_stay_each_site_s_own():
    def body(rank, group):
        net = Taught()
        session = og.distribute(net, og.LocalSteps(4), group=group, buffers="local")
        train(net, lerped, rank, range(4))
        session.detach()
        return weights(net.teacher)

    ours, theirs = run_on_lasting_groups(2, body)
    assert not any(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def test_the_remedy_for_drift_is_not_what_is_refused():
    def body(rank, group):
        net = Taught()
        settings = {"verify_every": 1, "buffers": "local"}
        session = og.distribute(net, og.LocalSteps(2), group=group, **settings)
        try:
            with pytest.raises(og.DriftError, match="pass on_drift='mend'") as told:
                train(net, lerped, rank, range(4))
            assert "make_equal" not in str(told.value)
        finally:
            session.detach()

    assert try_ranks(2, body) == [None, None]
