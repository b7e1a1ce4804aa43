from __future__ import annotations

from dataclasses import fields, replace

import pytest

from outergrad.launch.errors import RecipeError
from outergrad_lab.training.job import Job

WRONG = {
    "data": "faces",
    "model": "oracle",
    "method": "magic",
    "split": "odd",
    "optimizer": "magic",
    "sites": 0,
    "epochs": -1,
    "batch_size": 0,
    "lr": 0.0,
    "decay": 1.5,
    "seed": -1,
    "widths": (3, 0),
    "activation": "sine",
}


def test_every_field_is_checked():
    elsewhere = {"local", "joint"}  # by the method: see test_methods
    assert WRONG.keys() | elsewhere == {field.name for field in fields(Job)}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_told_with_its_option(name):
    with pytest.raises(RecipeError, match=f"--{name.replace('_', '-')} must be .*, not "):
        Job(**{name: WRONG[name]})


def test_the_model_must_fit_the_data():
    assert Job(data="mnist", model="mlp", widths=())
    with pytest.raises(RecipeError, match=r"--model gru needs sequences, .* 784 numbers"):
        Job(data="mnist", model="gru")


def test_the_widths_must_fit_the_model():
    assert Job(data="natops", model="gru", widths=(64,))
    assert Job(data="natops", model="gru", widths=(64, 32))
    with pytest.raises(RecipeError, match="--widths 64-64-9 does not fit --model gru: give 1 or 2"):
        Job(data="natops", model="gru", widths=(64, 64, 9))


def test_the_activation_must_fit_the_model():
    assert Job(data="natops", model="gru", widths=(64, 32), activation="tanh")
    with pytest.raises(RecipeError, match="--activation tanh has no place in --model gru"):
        Job(data="natops", model="gru", activation="tanh")


def test_the_first_difference_is_named():
    job = Job()
    assert job.first_difference(replace(job)) is None
    assert job.first_difference(replace(job, seed=1, epochs=9)) == "epochs"
