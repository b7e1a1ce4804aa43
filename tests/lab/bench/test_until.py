"""Training to a loss: every method goes on until it is there or is given up."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace

import pytest
from threads import at_every_site

from outergrad.launch.traffic import InterfaceTraffic
from outergrad_lab.bench import trainer, until
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.trainer import Phases
from outergrad_lab.bench.until import Mark, train_until

LOSSES = {"ddp": [2.0, 1.0, 0.5], "dad": [0.6, nan, 0.4], "alone": [inf, 3.0, 3.0]}
"""Test loss of each method after each ten steps; the last stays."""


class Learner:
    """A trainer whose loss falls as it is written, in steps of 0.1 s."""

    def __init__(self, method):
        self.losses, self.steps, self.closed = LOSSES[method], 0, False
        self.replica = SimpleNamespace(model=self)

    def step(self):
        assert not self.closed
        self.steps += 1
        return Phases(0.1, 0.0, 0.0)

    def claimed_bytes(self):
        return None

    def loss(self):
        return self.losses[min(self.steps // 10, len(self.losses)) - 1]

    def close(self):
        self.closed = True


class Meter:
    """Seven more bytes at every look."""

    def __init__(self):
        self.looks = 0

    def read(self):
        self.looks += 1
        return InterfaceTraffic(7 * self.looks, self.looks)


def run(monkeypatch, path, sites=1, **plan):
    """Trains at every site; returns each site's marks by method, and the learners."""
    learners = []

    def build(_plan, method, _data, _site):
        learners.append(Learner(method))
        return learners[-1]

    def body(meeting):
        marks = {}
        methods = Plan(methods=tuple(LOSSES), until_loss=0.5, check_every=10, **plan)
        for method, mark in train_until(methods, None, Meter(), meeting):
            marks.setdefault(method, []).append(mark)
        return marks

    monkeypatch.setattr(until, "Trainer", build)
    monkeypatch.setattr(trainer, "HEAD_START_S", 0)
    monkeypatch.setattr(until, "test_loss", lambda model, *_: model.loss())
    return at_every_site(path / "meeting", sites, body), learners


STOPS = {
    "at the loss": ({"max_steps": 60}, {"ddp": 3, "dad": 3, "alone": 6}),
    "at so many steps": ({"max_steps": 20}, {"ddp": 2, "dad": 2, "alone": 2}),
    "between two looks": ({"max_steps": 11}, {"ddp": 2, "dad": 2, "alone": 2}),
    "at so many seconds": ({"seconds": 3.5}, {"ddp": 3, "dad": 3, "alone": 4}),
}


@pytest.mark.parametrize(("plan", "looks"), STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("sites", [1, 2])
def test_each_method_stops_by_itself_and_the_others_go_on(
    monkeypatch, tmp_path, sites, plan, looks
):
    found, learners = run(monkeypatch, tmp_path, sites, **plan)
    for marks in found:
        assert {method: len(way) for method, way in marks.items()} == looks
    assert all(learner.closed for learner in learners)


def test_all_sites_are_told_the_loss_that_the_first_has_seen(monkeypatch, tmp_path):
    found, _ = run(monkeypatch, tmp_path, sites=2, max_steps=30)
    for marks in found:
        for method, way in marks.items():
            assert [mark.loss for mark in way] == pytest.approx(LOSSES[method], nan_ok=True)


def test_marks_add_up(monkeypatch, tmp_path):
    (marks,), _ = run(monkeypatch, tmp_path, max_steps=30)
    way = marks["ddp"]
    assert [mark.steps for mark in way] == [10, 20, 30]
    assert [mark.seconds for mark in way] == pytest.approx([1.0, 2.0, 3.0])
    assert [mark.sent_bytes for mark in way] == [7, 14, 21]


def test_before_the_first_step_no_loss_is_known():
    assert Mark() == Mark(steps=0, seconds=0, sent_bytes=0, loss=inf)
