"""Tasks of streams that drift, on made-up images."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.experiments import drift
from outergrad_lab.experiments.drift import CHANGES, WAYS, Course, DriftWork, Turn, outcomes
from outergrad_lab.experiments.task import Context, read

SMALL = {"warmup": 12, "stretch": 10, "changes": 3, "batch_size": 4, "width": 3}
PARAMETERS = 784 * 3 + 3 + 3 * 3 + 3
CASES = ["none to rotated", "none to noise", "rotated to noise"]


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    images = Format(shape=(784,), classes=3)
    monkeypatch.setattr(drift, "load", lambda *_: synthetic(images, 40, seed=0))


def run(way, told=None):
    told = [] if told is None else told
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    return read(DriftWork, {**SMALL, "way": way}).run(context)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_runs_and_counts_what_it_sends(way):
    told: list[int] = []
    found = run(way, told)
    steps = told[0]
    assert told[1:] == [1] * steps
    assert steps >= 12 + 3 * 10
    assert json.loads(json.dumps(found)) == found
    made = len(found["exchanges"])
    assert [row["case"] for row in found["rows"]] == CASES
    row = found["rows"][0]
    votes = steps if WAYS[way].waits else 0
    assert row["total_bytes"] >= 4 * PARAMETERS * made + votes
    assert row["total_bytes"] < 4 * PARAMETERS * made + votes + 2000 * made + 1
    assert ("false_alarms" in row) == WAYS[way].waits


def test_a_task_repeats():
    assert run("every 20 steps") == run("every 20 steps")


TURNS = [Turn(0, 20, None, ("none", "none")), Turn(20, 320, 0, ("noise", "none"))]


@pytest.mark.parametrize(
    ("exchanges", "delay", "missed", "alarms"),
    [
        ([19], 300, 1, 0.0),
        ([20], 1, 0, 0.0),
        ([5, 30, 31], 11, 0, 0.0),
        ([22, 200, 300], 3, 0, 10.0),
    ],
)
def test_delays_and_false_alarms_are_counted_from_each_change(exchanges, delay, missed, alarms):
    course = Course(exchanges, [0.5] * 320, 7)
    (found,) = outcomes(TURNS, [course, course], waits=True)
    assert (found["case"], found["total_bytes"]) == ("none to noise", 7)
    assert (found["delay"], found["missed"]) == (delay, missed)
    assert found["false_alarms"] == pytest.approx(alarms)


@pytest.mark.parametrize(("low", "steps"), [(0, 10), (25, 35), (300, 300)])
def test_a_site_has_recovered_when_it_is_near_what_it_was(low, steps):
    accuracy = [0.9] * 20 + [0.2] * low + [0.9] * (300 - low)
    turn = TURNS[1]
    found = drift.recovery(turn, accuracy)
    assert found == (steps if low else 10)


def test_one_site_after_the_other_changes():
    turns = DriftWork(way="ADWIN", changes=4)._turns()
    assert [turn.site for turn in turns] == [None, 0, 1, 0, 1]
    for before, after in pairwise(turns):
        assert after.begin == before.end
        changed = [
            k for k, (a, b) in enumerate(zip(before.shown, after.shown, strict=True)) if a != b
        ]
        assert changed == [after.site]


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "none"])
def test_a_change_changes_and_repeats(change):
    x = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    first, again = (CHANGES[change](x, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.shape == x.shape
    assert first.equal(again)
    assert not first.allclose(x, atol=0.01)


def test_an_unknown_way_is_refused():
    with pytest.raises(RecipeError, match="way must be one of every 10 steps"):
        DriftWork(way="every 3 steps")
