from __future__ import annotations

import pytest
import torch
from torch import nn

from outergrad.recipes.models import mlp


@pytest.mark.parametrize("widths", [(5, 2), (5, 7, 2), (5, 7, 6, 2)])
def test_an_mlp_has_the_widths_that_were_asked_for(widths):
    model = mlp(widths, nn.Tanh)
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert [linear[0].in_features, *(layer.out_features for layer in linear)] == list(widths)
    assert sum(isinstance(layer, nn.Tanh) for layer in model) == len(widths) - 2
    assert model(torch.ones(3, 5)).shape == (3, 2)


def test_the_output_is_linear():
    assert isinstance(mlp((5, 7, 2))[-1], nn.Linear)
