"""Sums become gradients only of loops that would not notice, and never change afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from cases import Events
from outergrad.core.memory import holders
from outergrad.step.step import SharedStep
from ranks import run_ranks

STEPS = 8
SIZE = 130
"""Of a square weight with as many elements as are worth it."""


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)).double()


MODEL = made()


class Run:
    """One site's training; beside it a copy of the model that sees the rows of both sites."""

    def __init__(self, rank, group, **settings):
        self.rank, self.model, self.pooled = rank, copy.deepcopy(MODEL), copy.deepcopy(MODEL)
        self.session = og.distribute(self.model, og.Dense(), group=group, **settings)
        self.params = list(self.model.parameters())
        self.lent = []

    def loss(self, model, rank, step):
        seed = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(3, SIZE, generator=seed, dtype=torch.float64)
        return model(x).square().mean()

    def backward(self, step):
        """Notes whether gradients of weights lie in the buffer, and checks them."""
        self.loss(self.model, self.rank, step).backward()
        self.lent.append([holders(p.grad) > 1 for p in self.params[::2]])
        self.pooled.zero_grad()
        sum(self.loss(self.pooled, rank, step) / 2 for rank in range(2)).backward()
        for p, other in zip(self.params, self.pooled.parameters(), strict=True):
            torch.testing.assert_close(p.grad, other.grad, rtol=1e-12, atol=1e-12)


def lent(body, **settings):
    """By step, whether both weights' gradients lay in the buffer; the same on both sites."""

    def site(rank, group):
        run = Run(rank, group, **settings)
        body(run)
        run.session.detach()
        return run.lent

    one, other = run_ranks(2, site)
    assert one == other
    assert all(len(set(step)) == 1 for step in one)
    return [step[0] for step in one]


def test_a_plain_loop_gets_the_sums_themselves():
    def body(run):
        for step in range(STEPS):
            run.backward(step)
            run.model.zero_grad()

    assert lent(body) == [False] * 3 + [True] * (STEPS - 3)


def test_a_recorded_step_gets_copies_and_those_behind_it_the_sums_again():
    def body(run):
        for step in range(STEPS):
            run.backward(step)
            run.model.zero_grad()

    events = Events()
    events.every = STEPS - 3
    found = lent(body, recorder=events)
    assert found == [False] * 3 + [True] * (STEPS - 6) + [False, False, True]


@pytest.mark.parametrize("places", [[0], [2], [0, 2], [0, 1, 2, 3]])
def test_gradients_that_somebody_keeps_never_change(places):
    """Also where it is one alone of those that lie in a buffer."""

    def body(run):
        kept = []
        for step in range(STEPS):
            run.backward(step)
            kept += [(p.grad, p.grad.clone()) for p in map(run.params.__getitem__, places)]
            run.model.zero_grad()
        for grad, then in kept:
            assert torch.equal(grad, then)

    assert any(lent(body))


def clip(run, step):
    nn.utils.clip_grad_norm_(run.params, 1e-3)
    run.model.zero_grad()


def zero_in_place(run, step):
    run.model.zero_grad(set_to_none=False)


def change_one(run, step):
    run.params[2].grad[0, 0] = 0
    run.model.zero_grad()


def change_a_part(run, step):
    run.params[2].grad.flatten()[1:].mul_(2)
    run.model.zero_grad()


@pytest.mark.parametrize("then", [clip, zero_in_place, change_one, change_a_part])
def test_a_loop_that_changes_gradients_gets_copies(then):
    """Where only one of both weights is changed, too: they have one buffer."""

    def body(run):
        for step in range(STEPS):
            run.backward(step)
            then(run, step)

    assert not any(lent(body))


def test_a_loop_that_begins_to_change_gradients_gets_copies_from_then_on():
    def body(run):
        for step in range(STEPS):
            run.backward(step)
            if step == 4:
                run.params[2].grad.mul_(0.5)
            run.model.zero_grad()

    assert lent(body) == [False] * 3 + [True] * 2 + [False] * (STEPS - 5)


def test_memory_that_a_loop_has_given_its_gradients_is_written_to():
    def body(run):
        own = [torch.zeros_like(p) for p in run.params]
        for step in range(STEPS):
            for p, memory in zip(run.params, own, strict=True):
                p.grad = memory.zero_()
            run.backward(step)
            assert all(p.grad is memory for p, memory in zip(run.params, own, strict=True))

    assert not any(lent(body))


def test_parts_of_a_flat_buffer_are_written_to():
    def body(run):
        sizes = [p.numel() for p in run.params]
        for step in range(STEPS):
            flat = torch.zeros(sum(sizes), dtype=torch.float64)
            for p, part in zip(run.params, flat.split(sizes), strict=True):
                p.grad = part.view(p.shape)
            run.backward(step)
            assert torch.equal(flat, torch.cat([p.grad.flatten() for p in run.params]))

    assert all(lent(body))  # by this test's count: all of them lie in one memory


@pytest.mark.parametrize("changed", [False, True])
def test_a_sum_that_was_changed_is_not_handed_on(changed, monkeypatch):
    """A site that lacks the step must not get another one than was applied."""
    steps, before = {}, SharedStep.finish
    monkeypatch.setattr(
        SharedStep, "finish", lambda s: (steps.update({s.context.comm.rank: s}), before(s))[1]
    )

    def body(run):
        for step in range(STEPS):
            run.backward(step)
            if step < STEPS - 1:
                run.model.zero_grad()
        means = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        if changed:
            run.params[0].grad.data.mul_(2)  # which no count of versions tells
        brought = steps[run.rank].brought()
        assert (brought is None) == changed
        if brought is not None:
            assert all(torch.equal(brought.means[name], mean) for name, mean in means.items())

    assert lent(body)[-1]
