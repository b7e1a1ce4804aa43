"""Methods take turns, and a machine that is slow for a while is slow for all of them."""

from __future__ import annotations

from collections import Counter as Count
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from threads import at_every_site

from outergrad.launch.traffic import InterfaceTraffic
from outergrad_lab.bench import measure, trainer
from outergrad_lab.bench.measure import Trainers, take_block, time_steps
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.trainer import Phases

METHODS = ("alone", "ddp", "dense", "dad")


class Clockwork:
    """A trainer whose steps take as long as they are told, and send a byte each.

    It tells a diary what it does.
    """

    def __init__(self, method, diary, seconds=1.0):
        self.method, self.diary, self.seconds = method, diary, seconds
        self.steps = 0
        self.diary.append(("build", method))

    def step(self):
        self.steps += 1
        self.diary.append(("step", self.method))
        return Phases(self.seconds, 0.0, 0.0)

    def claimed_bytes(self):
        return None if self.method == "ddp" else 1000 + 3 * self.steps

    def close(self):
        self.diary.append(("close", self.method))


class Meter:
    """A counter that is as far as the diary has steps."""

    def __init__(self, diary):
        self.diary = diary

    def read(self):
        steps = [method for event, method in self.diary if event == "step"]
        return InterfaceTraffic(len(steps), len(steps))


def run(monkeypatch, path, *, keep=True, sites=1, step_s=lambda site, method: 1.0, **plan):
    """Measures by clockwork; returns what every site yielded, and every site's diary."""
    diaries = [[] for _ in range(sites)]

    def build(_plan, method, _data, site):
        return Clockwork(method, diaries[site], step_s(site, method))

    def body(meeting):
        meter = Meter(diaries[meeting.site])
        return list(time_steps(Plan(methods=METHODS, **plan), None, keep, meter, meeting))

    monkeypatch.setattr(measure, "Trainer", build)
    monkeypatch.setattr(trainer, "HEAD_START_S", 0)
    monkeypatch.setattr(measure, "gc", SimpleNamespace(collect=lambda: None))  # takes its time
    return at_every_site(path / "meeting", sites, body), diaries


def test_each_round_has_all_methods_in_an_order_of_its_own(monkeypatch, tmp_path):
    ours, theirs = run(monkeypatch, tmp_path, rounds=60, sites=2, seconds=1e6)[0]
    order = [method for method, _ in ours]
    assert order == [method for method, _ in theirs]
    rounds = [tuple(order[i : i + 4]) for i in range(0, 240, 4)]
    assert rounds[0] == METHODS
    assert all(sorted(turn) == sorted(METHODS) for turn in rounds)
    followers = Count(pair for turn in rounds for pair in pairwise(turn))
    assert len(followers) == 12  # each method behind each other one
    assert max(followers.values()) < 30


@pytest.mark.parametrize("keep", [True, False])
def test_only_steps_after_the_warmup_are_measured(monkeypatch, tmp_path, keep):
    (yielded,), (diary,) = run(
        monkeypatch, tmp_path, keep=keep, rounds=2, steps=3, warmup=4, step_s=lambda *_: 0.5
    )
    for _, block in yielded:
        assert len(block.steps) == 3
        assert block.seconds == 1.5
        assert block.sent == InterfaceTraffic(3, 3)
    again = 1 if keep else 4
    assert Count(diary)["step", "dad"] == 4 + 3 + again + 3


def test_kept_trainers_are_built_once_and_closed_at_the_end(monkeypatch, tmp_path):
    _, (diary,) = run(monkeypatch, tmp_path, rounds=3)
    assert [method for event, method in diary if event == "build"] == list(METHODS)
    assert diary[-4:] == [("close", method) for method in METHODS]
    assert Count(event for event, _ in diary)["close"] == 4


def test_where_memory_is_short_one_is_closed_before_the_next_is_built(monkeypatch, tmp_path):
    _, (diary,) = run(monkeypatch, tmp_path, keep=False, rounds=3)
    life = [(event, method) for event, method in diary if event != "step"]
    built, closed = life[::2], life[1::2]
    assert {event for event, _ in built} == {"build"}
    assert {event for event, _ in closed} == {"close"}
    assert [method for _, method in built] == [method for _, method in closed]


def test_the_same_method_twice_in_a_row_is_not_built_anew():
    diary = []
    trainers = Trainers(lambda method: Clockwork(method, diary), keep=False)
    assert trainers.get("dad", 3) is trainers.get("dad", 3)
    assert Count(diary) == {("build", "dad"): 1, ("step", "dad"): 4}


def test_a_method_whose_time_is_used_up_is_left_out_at_every_site_alike(monkeypatch, tmp_path):
    def step_s(site, method):
        return 1.0 if (site, method) == (0, "ddp") else 100.0 * site

    yielded, diaries = run(
        monkeypatch, tmp_path, sites=3, step_s=step_s, rounds=4, steps=2, seconds=5
    )
    orders = [[method for method, _ in one] for one in yielded]
    assert orders[1:] == orders[:1] * 2
    # A round of ddp costs site 0 two timed seconds, and one for the step that warms it up.
    assert Count(orders[0]) == {"alone": 4, "ddp": 2, "dense": 4, "dad": 4}
    assert len({tuple(diary) for diary in diaries}) == 1


def test_a_block_tells_what_the_session_claims(tmp_path):
    def body(method, meeting):
        diary = []
        return take_block(Clockwork(method, diary), 4, Meter(diary), meeting).claimed_bytes

    assert at_every_site(tmp_path / "dad", 2, partial(body, "dad")) == [12, 12]
    assert at_every_site(tmp_path / "ddp", 2, partial(body, "ddp")) == [None, None]
