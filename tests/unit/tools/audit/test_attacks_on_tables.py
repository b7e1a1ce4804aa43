"""Tokens at positions, from the gradients of two tables; labels from the signs of deltas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from outergrad.tools.audit.attacks.bags import tokens_by_position
from outergrad.tools.audit.attacks.signs import labels_by_signs
from outergrad_lab.data.dataset import Format
from outergrad_lab.models import build_model

POSITIONS = 16
ENCODER = Format(shape=(POSITIONS,), classes=4, tokens=True, vocabulary=2000)


def tables(ids: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gradients of the tables of tokens and positions of an encoder 64 wide."""
    torch.manual_seed(seed)
    model = build_model("encoder", ENCODER, (64,))
    labels = torch.randint(4, (len(ids),), generator=torch.Generator().manual_seed(seed))
    params = [model.get_parameter(f"{name}.weight") for name in ("token", "position")]
    tokens, positions = torch.autograd.grad(cross_entropy(model(ids), labels), params)
    return tokens, positions


def distinct(texts: int) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    return 1 + torch.randperm(1999, generator=drawn)[: texts * POSITIONS].view(texts, POSITIONS)


@pytest.mark.parametrize("texts", [1, 4, 8])
def test_tokens_of_more_positions_than_the_model_is_wide_come_back_in_place(texts):
    ids = distinct(texts)
    found = tokens_by_position(*tables(ids))
    assert [one.tolist() for one in found] == [sorted(one) for one in ids.T.tolist()]


def test_positions_of_a_token_that_is_there_twice_are_not_claimed():
    ids = distinct(4)
    ids[0, 3] = ids[1, 9]
    found = tokens_by_position(*tables(ids))
    for place, one in enumerate(found):
        assert one.tolist() == ([] if place in {3, 9} else sorted(ids[:, place].tolist()))


def test_tables_of_noise_and_shuffled_positions_give_no_tokens():
    tokens, positions = tables(distinct(4))
    drawn = torch.Generator().manual_seed(0)
    noise = torch.randn(positions.shape, generator=drawn)
    used = tokens.norm(dim=1, keepdim=True) > 0
    other = torch.randn(tokens.shape, generator=drawn) * used
    for told in ((tokens, noise), (other, positions), (tokens, torch.zeros_like(positions))):
        assert all(len(one) == 0 for one in tokens_by_position(*told))


def test_the_label_of_each_row_is_where_its_delta_is_negative():
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 10, generator=drawn, requires_grad=True)
    labels = torch.randint(10, (32,), generator=drawn)
    (deltas,) = torch.autograd.grad(cross_entropy(logits, labels), [logits])
    assert torch.equal(labels_by_signs(deltas), labels)


def test_deltas_that_are_none_of_a_cross_entropy_give_no_labels():
    drawn = torch.Generator().manual_seed(0)
    assert len(labels_by_signs(torch.randn(32, 10, generator=drawn))) == 0
    assert len(labels_by_signs(torch.zeros(3, 10))) == 0
