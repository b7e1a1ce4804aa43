from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from outergrad.recipes.data import Format, synthetic
from outergrad.recipes.errors import RecipeError
from outergrad.recipes.models import INPUTS, MODELS, build_model
from outergrad.recipes.models.mlp import mlp

FORMATS = {
    "flat": Format(shape=(7,), classes=3),
    "sequences": Format(shape=(5, 4), classes=2),
    "images": Format(shape=(3, 16, 16), classes=10),
    "grey images": Format(shape=(1, 28, 28), classes=2),
    "tokens": Format(shape=(6,), classes=9, tokens=True),
}
PAIRS = [(model, data) for model in MODELS for data in FORMATS if MODELS[model].fits(FORMATS[data])]
MISFITS = [(model, data) for model in MODELS for data in FORMATS if (model, data) not in PAIRS]


def test_every_format_and_every_model_is_tested():
    assert {model for model, _ in PAIRS} == set(MODELS)
    assert {data for _, data in PAIRS} == set(FORMATS)
    assert {model.inputs for model in MODELS.values()} == set(INPUTS)


@pytest.mark.parametrize(("model", "data"), PAIRS)
def test_a_model_gives_a_logit_per_class_and_learns(model, data):
    rows = synthetic(FORMATS[data], rows=4, seed=0)
    net = build_model(model, FORMATS[data])
    logits = net(rows.x_train)
    assert logits.shape == (4, rows.classes, *rows.y_train.shape[1:])
    cross_entropy(logits, rows.y_train).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert any(p.grad.any() for p in net.parameters())


@pytest.mark.parametrize(("model", "data"), MISFITS)
def test_a_model_that_does_not_fit_says_which_do(model, data):
    with pytest.raises(RecipeError) as caught:
        build_model(model, FORMATS[data])
    said = str(caught.value)
    assert f"--model {model} needs {MODELS[model].inputs}" in said
    assert " x ".join(map(str, FORMATS[data].shape)) in said
    assert all(other in said.split(": use ")[1] for other, fitting in PAIRS if fitting == data)
    assert "\n" not in said


WRONG_WIDTHS = {
    "gru": ((64, 64), "--widths 64-64 does not fit --model gru: give 1"),
    "lstm": ((), "--widths '' does not fit --model lstm: give 1"),
    "vit": ((64,), "--widths 64 does not fit --model vit: leave it out"),
    "gpt": ((64,), "leave it out"),
    "cnn": ((64,), "leave it out"),
}


@pytest.mark.parametrize("model", WRONG_WIDTHS)
def test_widths_that_a_model_does_not_take_are_refused(model):
    data = next(data for name, data in PAIRS if name == model)
    widths, said = WRONG_WIDTHS[model]
    with pytest.raises(RecipeError, match=said):
        build_model(model, FORMATS[data], widths)


@pytest.mark.parametrize("model", ["gru", "lstm"])
def test_the_width_of_a_recurrent_model_is_its_hidden_features(model):
    assert build_model(model, FORMATS["sequences"], (11,)).recurrent.hidden_size == 11
    assert build_model(model, FORMATS["sequences"]).recurrent.hidden_size == 128


def test_a_vit_needs_whole_patches():
    with pytest.raises(RecipeError, match="sides of n x 4, not rows of 3 x 30 x 32"):
        build_model("vit", Format(shape=(3, 30, 32), classes=10))


def test_a_gpt_does_not_look_ahead():
    model = build_model("gpt", FORMATS["tokens"]).eval()
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    other = torch.tensor([[1, 2, 3, 8, 5, 6]])
    same = torch.isclose(model(ids), model(other)).all(dim=1)[0]
    assert same.tolist() == [True] * 3 + [False] * 3


def test_a_flat_mlp_begins_with_its_first_layer():
    assert "0.weight" in build_model("mlp", FORMATS["flat"]).state_dict()


@pytest.mark.parametrize("widths", [(5, 2), (5, 7, 2), (5, 7, 6, 2)])
def test_an_mlp_has_the_widths_that_were_asked_for(widths):
    model = mlp(widths, nn.Tanh)
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert [linear[0].in_features, *(layer.out_features for layer in linear)] == list(widths)
    assert sum(isinstance(layer, nn.Tanh) for layer in model) == len(widths) - 2
    assert model(torch.ones(3, 5)).shape == (3, 2)


def test_the_output_is_linear():
    assert isinstance(mlp((5, 7, 2))[-1], nn.Linear)
