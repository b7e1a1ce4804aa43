from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.models import INPUTS, MODELS, build_model
from outergrad_lab.models.small import ACTIVATIONS, mlp

FORMATS = {
    "flat": Format(shape=(7,), classes=3),
    "sequences": Format(shape=(5, 4), classes=2),
    "images": Format(shape=(3, 16, 16), classes=10),
    "grey images": Format(shape=(1, 28, 28), classes=2),
    "tokens": Format(shape=(6,), classes=9, tokens=True),
    "texts": Format(shape=(6,), classes=3, tokens=True, vocabulary=11),
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
    "gru": ((64, 64, 9), "--widths 64-64-9 does not fit --model gru: give 1 or 2"),
    "lstm": ((), "--widths '' does not fit --model lstm: give 1 or 2"),
    "encoder": ((130,), "--widths 130 does not fit --model encoder: give a multiple of 4"),
    "vit": ((64,), "--widths 64 does not fit --model vit: leave it out"),
    "gpt": ((130,), "--widths 130 does not fit --model gpt: give a multiple of 4"),
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


@pytest.mark.parametrize("model", ["gru", "lstm"])
def test_another_width_of_a_recurrent_model_is_a_layer_before_the_head(model):
    plain = build_model(model, FORMATS["sequences"], (11,))
    assert plain.head.out_features == 2
    first, between, last = build_model(model, FORMATS["sequences"], (11, 7)).head
    assert (first.in_features, first.out_features, last.out_features) == (11, 7, 2)
    assert isinstance(between, nn.ReLU)


PLACES = {  # formats, widths
    "mlp": ("flat", (5,)),
    "gru": ("sequences", (8, 5)),
    "lstm": ("sequences", (8, 5)),
    "vit": ("images", ()),
    "encoder": ("texts", (8,)),
    "plain-convolutions": ("grey images", (8, 5, 6)),
}


@pytest.mark.parametrize("model", PLACES)
def test_an_activation_can_be_chosen(model):
    data, widths = PLACES[model]
    outputs, rows = {}, synthetic(FORMATS[data], rows=4, seed=0)
    for name, kind in {None: None, **ACTIVATIONS}.items():
        torch.manual_seed(1)
        net = build_model(model, FORMATS[data], widths, name)
        assert kind is None or any(isinstance(module, kind) for module in net.modules())
        outputs[name] = net(rows.x_train)
    own = MODELS[model].activation
    same = [name for name in ACTIVATIONS if outputs[name].equal(outputs[None])]
    assert same == [own]


def test_every_model_has_a_place_for_an_activation_or_none():
    assert PLACES.keys() == {name for name in MODELS if MODELS[name].activation}


NO_PLACE = {
    "gpt": ("tokens", None, "--activation tanh has no place in --model gpt: leave it out"),
    "cnn": ("images", None, "--activation tanh has no place in --model cnn: leave it out"),
    "gru": ("sequences", None, "--model gru with --widths 128: leave it out, or give 2 widths"),
    "lstm": ("sequences", (5,), "--model lstm with --widths 5: leave it out, or give 2 widths"),
    "mlp": ("flat", (), "--model mlp with --widths '': leave it out, or give 1 width$"),
}


@pytest.mark.parametrize("model", NO_PLACE)
def test_an_activation_without_a_place_is_refused(model):
    data, widths, said = NO_PLACE[model]
    with pytest.raises(RecipeError, match=said):
        build_model(model, FORMATS[data], widths, "tanh")


def test_an_encoder_does_not_see_padding():
    model = build_model("encoder", FORMATS["texts"], (8,))
    short = torch.tensor([[3, 4, 0, 0, 0, 0]])
    expected = model(short[:, :2])
    assert torch.allclose(model(short), expected, atol=1e-6)
    assert torch.allclose(model.eval()(short), expected, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(model(short), expected, atol=1e-6), "PyTorch's fast path"
    assert not torch.allclose(model(torch.tensor([[3, 4, 5, 0, 0, 0]])), expected, atol=1e-3)


def test_an_empty_text_has_finite_logits():
    model = build_model("encoder", FORMATS["texts"], (8,))
    logits = model(torch.zeros(2, 6, dtype=torch.int64))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


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


def test_a_bag_does_not_see_padding():
    model = build_model("bag", FORMATS["texts"], (8,))
    short, long = torch.tensor([[3, 4, 0, 0, 0, 0]]), torch.tensor([[3, 4, 3, 4, 3, 4]])
    torch.testing.assert_close(model(short), model(long))
