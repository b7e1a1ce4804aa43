"""What a run of Weights & Biases gets."""

from __future__ import annotations

import sys

import pytest
from event_examples import EVENTS, LAYER, RUN, SCALARS, STEP

import outergrad as og
from made_up_run import TRAVELS, events
from outergrad.record.wandb import AXIS


class FakeRun:
    """Keeps what it is told, as `wandb.init(...)` would."""

    def __init__(self):
        self.logged, self.axes, self.config = [], {}, FakeConfig()

    def log(self, values):
        self.logged.append(values)

    def define_metric(self, name, step_metric=None, hidden=None):
        assert name not in self.axes
        self.axes[name] = step_metric


class FakeConfig(dict):
    def update(self, values, allow_val_change=False):
        assert allow_val_change or not values.keys() & self.keys()
        super().update(values)


@pytest.fixture
def run():
    run = FakeRun()
    recorder = og.WandB(run, every=10)
    for event in events(rank=1, sites=2, steps=60, every=10, start=1.7e9):
        recorder.record(event)
    recorder.close()
    return run


def test_one_call_per_recorded_step_with_all_layers(run):
    steps = [values for values in run.logged if "step/sent_bytes" in values]
    assert [values[AXIS] for values in steps] == [*range(0, 60, 10)]
    for values in steps:
        assert {f"cosine/{name}" for name in TRAVELS} <= values.keys()
    assert steps[0]["travels/head.weight"] == "dense"
    assert steps[0]["spectral_norm/head.weight"] == 3.0


def test_scalars_have_their_names_and_step(run):
    losses = [values for values in run.logged if "loss" in values]
    assert [values[AXIS] for values in losses] == [*range(1, 61)]
    assert all(values.keys() == {AXIS, "loss"} for values in losses)


def test_everything_is_drawn_over_synchronised_steps(run):
    for name in {name for values in run.logged for name in values} - {AXIS}:
        drawn_by = name if name in run.axes else name.split("/")[0] + "/*"
        assert run.axes[drawn_by] == AXIS, name


def test_the_configuration_tells_of_the_run(run):
    about = run.config["outergrad"]
    assert about["method"] == "RankDAD(rank=4)"
    assert about["shared_parameters"] == 64 * 32 + 64 + 64 * 64 + 64 + 10 * 64 + 10


def test_what_was_not_measured_is_left_out(run):
    assert all(None not in values.values() for values in run.logged)
    first = next(values for values in run.logged if "step/sent_bytes" in values)
    assert "step/seconds" not in first


def test_a_training_that_goes_on_updates_the_configuration():
    run = FakeRun()
    recorder = og.WandB(run)
    recorder.record(RUN)
    recorder.record(og.events.Run(**{**vars(RUN), "step": 30}))
    assert run.config["outergrad"]["step"] == 30


def test_layers_of_a_step_that_never_came_are_forgotten():
    run = FakeRun()
    recorder = og.WandB(run)
    recorder.record(LAYER)
    recorder.close()
    recorder.record(STEP)
    assert run.logged == [
        {AXIS: 10, **{f"step/{k}": v for k, v in vars(STEP).items() if k in STEP_FIGURES}}
    ]


STEP_FIGURES = vars(STEP).keys() - {"rank", "step", "time", "took_part"}


def test_scalars_between_layers_and_their_step_do_not_take_them():
    run = FakeRun()
    recorder = og.WandB(run)
    for event in (LAYER, SCALARS, STEP):
        recorder.record(event)
    assert [f"cosine/{LAYER.layer}" in values for values in run.logged] == [False, True]


def test_wandb_itself_is_not_imported():
    recorder = og.WandB(FakeRun())
    for event in EVENTS.values():
        recorder.record(event)
    assert "wandb" not in sys.modules


def test_every_is_1_or_more():
    with pytest.raises(ValueError, match="every=0; use 1 or more"):
        og.WandB(FakeRun(), every=0)
