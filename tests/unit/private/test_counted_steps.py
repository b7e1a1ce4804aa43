"""A session counts what it releases, each step once, before its first message."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import outergrad as og
from cases import Boom, mlp
from outergrad.private import (
    Ledger,
    Poisson,
    Release,
    Run,
)
from ranks import run_on_lasting_groups, try_ranks
from stars import on_star

DELTA, NOISE, RATE = 1e-5, 1.1, 0.01
MODEL = mlp(6, 7, 5)
STEP = Release(NOISE, Poisson(RATE), sites=2, sums="open")


def loss_of(model, rows=3):
    return model(torch.randn(rows, 6)).square().sum(1).mean()


def private_of(ledger, **about):
    settings = {"clip": 1.0, "noise": NOISE, "batch": 6, "sampling": Poisson(RATE)}
    return og.Private(**(settings | about), ledger=ledger)


def session_of(ledger, group, model=None, **about):
    """A model and its session, which is counted in a ledger."""
    model = copy.deepcopy(MODEL) if model is None else model
    where = {"group": group} if not isinstance(group, og.Star) else {"transport": group}
    private = private_of(ledger, **{k: about.pop(k) for k in [*about] if k in PRIVATE})
    return model, og.distribute(model, og.Dense(), transform=private, **where, **about)


PRIVATE = {"clip", "noise", "batch", "sampling", "clipping"}


# -- what counts ----------------------------------------------------------------------------------


def test_each_shared_step_counts_once_and_passes_of_no_sync_do_not():
    def body(rank, group):
        ledger = Ledger(DELTA)
        model, session = session_of(ledger, group)
        found = []
        for _ in range(3):
            model.zero_grad()
            with session.no_sync():
                loss_of(model).backward()
                found.append(ledger.steps)
                loss_of(model).backward()
            loss_of(model).backward()
            found.append(ledger.steps)
        session.detach()
        return found, ledger.runs

    for found, runs in run_on_lasting_groups(2, body):
        assert found == [0, 1, 1, 2, 2, 3]
        assert runs == (Run(STEP, 3),)


def test_it_counts_before_anything_is_sent(tmp_path):
    """A ledger that cannot be written stops the step; its file has a step that nobody answers."""

    class Full(Ledger):
        def record(self, release, steps=1):
            raise OSError("no space")

    def body(rank, group):
        ledger = Full(DELTA) if rank == 0 else Ledger(DELTA, file=tmp_path / "ledger.json")
        model, session = session_of(ledger, group)
        before = session.stats().total_sent_bytes, session._at.comm.sent_bytes
        try:
            loss_of(model).backward()
        finally:
            if rank == 0:
                session._at.comm.close()
                words = 5 * 8 + 2 * 8  # what ledgers are compared by, and expected batches
                assert session._at.comm.sent_bytes <= before[1] + 2 * words
        return ledger.steps

    first, second = try_ranks(2, body)
    assert isinstance(first, OSError)
    assert isinstance(second, og.SiteLostError)
    assert json.loads((tmp_path / "ledger.json").read_text())["runs"][0]["steps"] == 1


class Switched(nn.Module):
    """Whose backward can be made to raise, in its middle."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 5)
        self.raises = False

    def forward(self, x):
        x = self.first(x).tanh()
        return self.second(Boom.apply(x, self.raises))


def make_steps(model, fails_here, *, early=False, steps=4):
    """Numbers of the steps that raise, as the third does where the backward of this site fails."""
    raised = []
    for step in range(steps):
        model.zero_grad()
        fails = fails_here and step == 2
        model.raises = fails and not early
        loss = loss_of(model)
        try:
            Boom.apply(loss, fails and early).backward()
        except (og.StepDiscardedError, ArithmeticError):
            raised.append(step)
    return raised


@pytest.mark.parametrize("early", [True, False])
def test_discarded_steps_count(early):
    """Whether the backward of a site raised in the model or before, in the loss."""

    def body(rank, group):
        ledger = Ledger(DELTA)
        model, session = session_of(ledger, group, Switched())
        raised = make_steps(model, rank == 1, early=early)
        session.detach()
        return raised, ledger.runs

    for raised, runs in run_on_lasting_groups(2, body):
        assert raised == [2]
        assert runs == (Run(STEP, 4),)


@pytest.mark.parametrize("blind", [True, False])
def test_sums_of_a_discarded_step_count_as_parts(blind):
    """Around a hub: to whom a site adds nothing, the others' noise alone hides the others."""

    def body(rank, transport):
        ledger = Ledger(DELTA)
        model, session = session_of(ledger, transport, Switched())
        raised = make_steps(model, rank == 1)
        session.detach()
        return raised, ledger.runs

    step = Release(NOISE, Poisson(RATE), sites=3, sums="masked" if blind else "trusted")
    shown = Release(NOISE, Poisson(RATE), sites=3, sums="open")
    for raised, runs in on_star(3, body, {"blind": blind}):
        assert raised == [2]
        assert runs == (Run(step, 3), Run(shown, 1), Run(step, 1))


def test_a_step_that_starts_again_has_the_same_noise_and_shows_parts():
    """A batch that does not fit the plan: the two sums differ by this site's part."""
    drawn = []

    class Counting:
        def draw(self, count, device):
            drawn.append(count)
            return torch.randn(count)

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.both = nn.Linear(6, 6), nn.Linear(6, 6), True

        def forward(self, x):
            return self.second(self.first(x)) if self.both else self.first(x)

    def body(rank, transport):
        ledger, model = Ledger(DELTA), Chosen()
        private = private_of(ledger)
        object.__setattr__(private, "_source", Counting())
        session = og.distribute(model, og.Dense(), transport=transport, transform=private)
        for step in range(6):
            model.zero_grad()
            model.both = rank != 1 or step != 4
            loss_of(model).backward()
        session.detach()
        return ledger.runs

    step = Release(NOISE, Poisson(RATE), sites=2, sums="masked")
    shown = Release(NOISE, Poisson(RATE), sites=2, sums="open")
    for runs in on_star(2, body, {"blind": True}):
        assert runs == (Run(step, 5), Run(shown, 1), Run(step, 1))
    whole = 2 * (6 * 6 + 6)
    assert sum(drawn) == 2 * 6 * whole


def test_adaptive_clipping_counts_gradients_and_counts_together_as_noise():
    def body(rank, group):
        ledger = Ledger(DELTA)
        model, session = session_of(ledger, group, clipping="adaptive", batch=400)
        for _ in range(2):
            model.zero_grad()
            loss_of(model).backward()
        session.detach()
        return ledger.runs

    assert run_on_lasting_groups(2, body) == [(Run(STEP, 2),)] * 2
