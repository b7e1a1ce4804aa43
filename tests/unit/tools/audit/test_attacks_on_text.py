"""Texts from the spans of two attention layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outergrad.tools.audit.attacks.text import read_texts, text_layers
from outergrad_lab.data.dataset import Format
from outergrad_lab.models import build_model

WORDS = 30
GPT = Format(shape=(16,), classes=WORDS, tokens=True)
ENCODER = Format(shape=(16,), classes=4, tokens=True, vocabulary=400)


def made(name: str, format: Format, texts: int, positions: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = build_model(name, format, (96,))
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(1, format.vocabulary or WORDS, (texts, positions), generator=drawn)
    labels = (texts,) if format.vocabulary else (texts, positions)
    return model, ids, torch.randint(format.classes, labels, generator=drawn)


def gradients(model: nn.Module, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    cross_entropy(model(ids), labels).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def read(model: nn.Module, found: dict[str, Tensor], ids: Tensor, vocabulary: int) -> set[tuple]:
    texts, positions = ids.shape
    about = {"vocabulary": vocabulary, "positions": positions, "texts": texts}
    drawn = torch.Generator().manual_seed(2)
    return set(map(tuple, read_texts(model, found, **about, generator=drawn).tolist()))


@pytest.mark.parametrize("texts", [1, 8])
def test_texts_of_a_gpt_come_back_exactly(texts):
    model, ids, labels = made("gpt", GPT, texts, 8)
    layers = text_layers(model, WORDS, 8)
    assert layers is not None
    assert layers.causal
    assert read(model, gradients(model, ids, labels), ids, WORDS) == set(map(tuple, ids.tolist()))


@pytest.mark.parametrize("texts", [1, 8])
def test_texts_of_an_encoder_come_back_exactly(texts):
    model, ids, labels = made("encoder", ENCODER, texts, 6)
    layers = text_layers(model, 400, 6)
    assert layers is not None
    assert not layers.causal
    assert read(model, gradients(model, ids, labels), ids, 400) == set(map(tuple, ids.tolist()))


@pytest.mark.parametrize(("name", "format"), [("gpt", GPT), ("encoder", ENCODER)])
def test_a_text_alone_comes_back_up_to_half_the_width(name, format):
    words, positions = format.vocabulary or WORDS, 48
    model, ids, labels = made(name, replace(format, shape=(positions,)), 1, positions)
    assert read(model, gradients(model, ids, labels), ids, words) == set(map(tuple, ids.tolist()))


def test_more_tokens_than_the_layer_is_wide_give_no_text():
    model, ids, labels = made("gpt", GPT, 8, 16)
    assert read(model, gradients(model, ids, labels), ids, WORDS) == set()


@pytest.mark.parametrize(("name", "format"), [("gpt", GPT), ("encoder", ENCODER)])
def test_noise_has_no_texts(name, format):
    model, ids, labels = made(name, format, 4, 6)
    drawn = torch.Generator().manual_seed(0)
    found = gradients(model, ids, labels)
    noise = {n: torch.randn(g.shape, generator=drawn) for n, g in found.items()}
    assert read(model, noise, ids, format.vocabulary or WORDS) == set()


def test_a_model_without_attention_has_no_text_layers():
    assert text_layers(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)), 10, 6) is None
