"""Steps that follow the last one's plan send and leave the same as if planned anew."""

from __future__ import annotations

import copy
import hashlib
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import nn

import outergrad as og
from cases import Events
from covering import rest_slow
from outergrad.messages.checksum import SummedRoom
from outergrad.session.exchange import Exchange
from outergrad.step.receiving import Receiver
from outergrad.step.step import SharedStep
from ranks import run_ranks

STEPS = 24
"""More than one vote is for."""


class Net(nn.Module):
    """Layers of which one can be left out, in two dense messages."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.side = nn.Linear(6, 600), nn.Linear(600, 600)
        self.norm = nn.BatchNorm1d(600) if norm else nn.Identity()
        self.last = nn.Linear(600, 3)

    def forward(self, x, leave_out=False):
        h = self.norm(torch.relu(self.first(x)))
        return self.last(h if leave_out else h + self.side(h))


def made(norm):
    torch.manual_seed(0)
    return Net(norm)


MADE = {norm: made(norm) for norm in (False, True)}
"""Before there are threads, which share one random stream."""


def batch(rank, step, rows):
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 6, generator=seed)


@contextmanager
def planned_anew():
    """No step follows the plan of the last one."""
    before = Exchange.keep_plan
    Exchange.keep_plan = lambda exchange, step: None
    try:
        yield
    finally:
        Exchange.keep_plan = before


def digest(tensors):
    found = hashlib.sha256()
    for t in tensors:
        found.update(b"-" if t is None else t.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def plain(run, step):
    run.step(run.loss(step))


def left_out_here(run, step):
    run.step(run.loss(step, leave_out=run.rank == 1 and step % 7 == 6))


def left_out_everywhere(run, step):
    run.step(run.loss(step, leave_out=step in (9, 10, 11, 12, 18)))


def accumulating(run, step):
    if step % 8 == 7:
        with run.session.no_sync():
            run.loss(step, seed=50).backward()
    run.step(run.loss(step))


def other_rows(run, step):
    run.step(run.loss(step, more=step % 10 == 9))


def raising(run, step):
    if step == 13 and run.rank == 1:
        handle = run.model.side.weight.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.loss(step).backward()
        handle.remove()
    elif step == 13:
        with pytest.raises(og.StepDiscardedError):
            run.loss(step).backward()
    else:
        run.step(run.loss(step))
    run.model.zero_grad()


def not_finite(run, step):
    factor = float("nan") if step == 13 and run.rank == 1 else 1.0
    (factor * run.loss(step)).backward()
    run.step(None)


def saved(run, step):
    run.step(run.loss(step))
    if step == 12:
        run.session.load_state_dict(run.session.state_dict())


def kept_gradients(run, step):
    run.loss(step).backward()
    if step % 3 == 0:
        run.step(None)


def hooks_that_come(run, step):
    """Of others, behind gradients; they see and change the mean."""
    side, first = run.model.side.weight, run.model.first.weight
    if step == 5:
        run.hook = side.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    if step == 11:
        first.register_post_accumulate_grad_hook(lambda p: run.found.append(digest([p.grad])))
    if step == 17:
        run.hook.remove()
    run.step(run.loss(step))


def clipped(run, step):
    """In place, from some step on."""
    run.loss(step).backward()
    if step > 10:
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.step(None)


def looked_at(run, step):
    run.step(run.loss(step))
    assert run.session.stats().step == step + 1


LOOPS = {
    loop.__name__: loop
    for loop in (
        plain,
        left_out_here,
        left_out_everywhere,
        accumulating,
        other_rows,
        raising,
        not_finite,
        saved,
        kept_gradients,
        hooks_that_come,
        clipped,
        looked_at,
    )
}
QUICK = ["plain", "left_out_here", "accumulating", "raising", "saved"]


class Run:
    """One site's training."""

    def __init__(self, rank, group, loop, norm=False, rows=5, **settings):
        self.rank, self.loop, self.rows = rank, loop, rows
        self.model = copy.deepcopy(MADE[norm])
        self.session = og.distribute(self.model, group=group, **settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.found = []

    def loss(self, step, more=0, seed=0, leave_out=False):
        x = batch(self.rank, step + seed, self.rows + more)
        return self.model(x, leave_out).square().mean()

    @property
    def sent(self):
        """Bytes of the last step, and of its layers."""
        stats = self.session.stats()
        layers = {name: (one.travels, one.sent_bytes) for name, one in stats.layers.items()}
        return stats.step, stats.sent_bytes, stats.received_bytes, layers

    def step(self, loss):
        if loss is not None:
            loss.backward()
        self.found.append((digest([p.grad for p in self.model.parameters()]), self.sent))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def go(self):
        for step in range(STEPS):
            self.loop(self, step)
        self.session.flush()
        stats = self.session.stats()
        end = digest([*self.model.parameters(), *self.model.buffers()])
        self.session.detach()
        return self.found, end, stats.step, stats.total_sent_bytes


@pytest.fixture
def repeated(monkeypatch):
    """Of each step that began with the plan of the last one, whether it went by it to the end."""
    times, before = [], SharedStep.finish

    def finish(step):
        began = step.plan is not None
        try:
            before(step)
        finally:
            if began:
                times.append(step.plan is not None and step.applied)

    monkeypatch.setattr(SharedStep, "finish", finish)
    return times


def trained(loop, sites=2, **settings):
    method = settings.pop("method", og.Dense)
    more = {"max_bad_steps": 2} if loop == "not_finite" else {}
    return run_ranks(
        sites,
        lambda rank, group: Run(rank, group, LOOPS[loop], method=method(), **settings, **more).go(),
    )


@pytest.mark.parametrize("loop", rest_slow(LOOPS, QUICK))
def test_a_loop_goes_as_if_every_step_was_planned(loop, repeated):
    found = trained(loop)
    assert repeated.count(True) >= (STEPS if loop.startswith("left_out") else 2 * STEPS) / 2
    with planned_anew():
        assert trained(loop) == found


def test_a_step_that_raised_ends_also_where_nothing_is_foreseen_any_more(repeated):
    def body(rank, group):
        run = Run(rank, group, plain, method=og.Dense())
        for step in range(13):
            plain(run, step)
        handle = run.model.side.weight.register_hook(lambda g: 1 / 0) if rank else None
        with pytest.raises((ZeroDivisionError, og.StepDiscardedError)):
            run.loss(13).backward()
        run.model.zero_grad()
        if handle is not None:
            handle.remove()
        with run.session.join(step=run.optimizer.step):  # it forgets the headers of before
            for step in range(14, STEPS):
                run.step(run.loss(step))
        run.session.detach()
        return run.found

    found = run_ranks(2, body)
    assert repeated.count(True) == 2 * 11
    with planned_anew():
        assert run_ranks(2, body) == found


SETTINGS = {
    "three sites": {"sites": 3},
    "buffers that are written": {"norm": True, "buffers": "mean"},
    "buffers of their own": {"norm": True, "buffers": "local"},
    "weights": {"weighting": "samples"},
    "verified": {"verify_every": 3},
    "sketches from step 14 to 18": {
        "method": lambda: og.Schedule({0: og.Dense(), 14: og.RankDAD(rank=2), 18: og.Dense()})
    },
    "rows that do not pay": {"method": lambda: og.DAD()},
    "a part": {"method": lambda: og.PerLayer({"side.*": og.Local(), "*": og.Dense()})},
    "every other": {"method": lambda: og.Dense(every=2)},
}


def test_layers_that_count_their_rows_may_be_used_as_before(repeated):
    """Factors of so many rows would be more bytes: all is dense, as long as they are so many."""
    found = trained("other_rows", method=og.DAD, rows=700)
    assert repeated.count(True) > STEPS
    with planned_anew():
        assert trained("other_rows", method=og.DAD, rows=700) == found


@pytest.mark.parametrize("settings", rest_slow(SETTINGS, [*SETTINGS][::3]))
def test_any_settings_go_as_if_every_step_was_planned(settings):
    found = trained("left_out_here", **SETTINGS[settings])
    with planned_anew():
        assert trained("left_out_here", **SETTINGS[settings]) == found


def test_a_site_that_plans_every_step_goes_with_one_that_does_not(repeated, monkeypatch):
    """The votes on the sixteen steps say that both received the same."""
    before = Exchange.keep_plan

    def keep_plan(exchange, step):
        if step.context.comm.rank == 0:
            before(exchange, step)

    monkeypatch.setattr(Exchange, "keep_plan", keep_plan)
    found = run_ranks(2, lambda rank, group: Run(rank, group, plain, method=og.Dense()).go())
    assert found[0][:3] == found[1][:3]
    assert repeated.count(True) == STEPS - 2


def told(events):
    """What is not about time."""
    steps = [event for event in events if isinstance(event, og.events.Step)]
    return [(e.step, e.sent_bytes, e.received_bytes, e.total_sent_bytes) for e in steps], [
        (e.step, e.layer, e.travels, e.sent_bytes) for e in events.layers
    ]


def test_steps_of_which_a_recorder_is_told_follow_the_plan_too(repeated):
    def recorded():
        events = [Events(), Events()]
        for one in events:
            one.every = 5
        run_ranks(
            2,
            lambda rank, group: Run(
                rank, group, plain, method=og.Dense(), recorder=events[rank]
            ).go(),
        )
        return [told(one) for one in events]

    found = recorded()
    assert [step for step, *_ in found[0][0]] == [0, 5, 10, 15, 20]
    assert repeated.count(True) == 2 * (STEPS - 2)
    with planned_anew():
        assert recorded() == found


def test_two_sessions_on_a_group_take_turns(repeated):
    def body(rank, group):
        runs = [Run(rank, group, plain, method=og.Dense()) for _ in range(2)]
        for step in range(STEPS):
            for run in runs:
                plain(run, step)
        return [run.found for run in runs]

    one, other = run_ranks(2, body)[0]
    assert one == other
    assert not repeated  # only headers tell them apart


@pytest.mark.parametrize("name", ["plain", "other_rows", "left_out_here", "raising"])
def test_digests_are_of_the_sums_that_came(name, repeated, monkeypatch):
    """The same on both sites, and another one for every other sum."""
    found, before = [], SummedRoom.checksum

    def checksum(room):
        own = before(room)
        found.append((digest([room.tensor]), int(own)))
        return own

    monkeypatch.setattr(SummedRoom, "checksum", checksum)
    run_ranks(2, lambda rank, group: Run(rank, group, LOOPS[name], method=og.Dense()).go())
    digests = dict(found)
    assert len(found) >= 2 * STEPS
    assert found == [(came, digests[came]) for came, _ in found]
    assert len(set(digests.values())) == len(digests) > STEPS / 2


def test_sums_that_differ_are_found(repeated, monkeypatch):
    """One site's differs in a step that is like the last; the vote comes three steps later."""
    before = Receiver.receive

    def receive(receiver, sent, ballot):
        last = before(receiver, sent, ballot)
        if ballot.step == 13 and receiver.context.comm.rank == 1:
            ballot.note_sums(1)
        return last

    monkeypatch.setattr(Receiver, "receive", receive)

    def body(rank, group):
        with pytest.raises(og.DriftError, match="one of the steps 1 to 16") as caught:
            Run(rank, group, plain, method=og.Dense()).go()
        return caught.value.step

    assert run_ranks(2, body) == [17, 17]


@pytest.mark.parametrize("moment", ["in backward", "between steps"])
def test_a_lost_site_is_the_same_error(moment, repeated):
    def body(rank, group):
        run = Run(rank, group, plain, method=og.Dense(), timeout=timedelta(seconds=1))
        for step in range(13):
            plain(run, step)
        loss = run.loss(13)
        if rank == 1:
            if moment == "in backward":
                run.model.first.weight.register_hook(lambda g: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            run.session._at.comm.close()
            return None
        with pytest.raises(og.SiteLostError) as caught:
            loss.backward()
        assert all(p.grad is None for p in run.model.parameters())
        assert "headers" in caught.value.place or "gradients" in caught.value.place
        return caught.value.sites, caught.value.step, run.sent[0]

    found = run_ranks(2, body)
    assert repeated.count(False) == 1
    with planned_anew():
        assert run_ranks(2, body) == found


@pytest.mark.parametrize("method", [og.Dense, og.DAD, lambda: og.RankDAD(rank=2)])
def test_hooks_of_others_run_where_only_another_site_reaches_the_parameter(method, repeated):
    """Site 1 never uses the layer; an optimizer in backward steps there as on site 0."""

    def body(rank, group):
        run = Run(rank, group, plain, method=method())
        side, steps = run.model.side.weight, []
        side.register_post_accumulate_grad_hook(lambda p: steps.append(digest([p.grad])))
        for step in range(STEPS):
            run.step(run.loss(step, leave_out=rank == 1))
        run.session.detach()
        return steps

    steps, other_steps = run_ranks(2, body)
    assert len(steps) == STEPS
    assert steps == other_steps
    assert repeated.count(True) > STEPS
