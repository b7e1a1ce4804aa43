"""Whether triplets are found from factors, or from the gradient that autograd forms."""

import pytest
from torch import nn

import outergrad as og
from outergrad.session.inspect import inspect

FEW, MANY = 100, 1000
LARGE = [nn.LSTM(512, 512), nn.GRU(512, 512), nn.RNN(1500, 1500)]
SMALL = [nn.LSTM(128, 128), nn.GRU(128, 128), nn.RNN(128, 128)]


@pytest.mark.parametrize("layer", [*LARGE, nn.Linear(1024, 1024)])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_products_with_factors_of_large_layers_cost_less_than_the_gradient(layer, rows):
    assert all(taps(layer, rows))


@pytest.mark.parametrize("layer", SMALL)
def test_a_small_recurrent_layer_does_not_compute_its_gates_twice(layer):
    assert not any(taps(layer, MANY))


def test_a_linear_layer_of_the_same_size_has_no_gates():
    assert all(taps(nn.Linear(128, 512), MANY))


def taps(layer: nn.Module, rows: int) -> list[bool]:
    found = inspect(nn.Sequential(layer), og.RankDAD(rank=4), og.RULES)
    answers = [
        compressor.taps(unit, [[rows] * len(unit.slots)] * 2)
        for compressor, units in found.compressors.items()
        for unit in units
        if unit.slots
    ]
    assert answers
    return answers
