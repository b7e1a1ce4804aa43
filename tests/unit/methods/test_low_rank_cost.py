"""Whether triplets are found from factors, or from the gradient that autograd forms."""

import pytest
from torch import nn

import outergrad as og
from outergrad.session.inspect import inspect

FEW, MANY = 100, 1000


@pytest.mark.parametrize("layer", [nn.LSTM(512, 512), nn.RNN(1500, 1500), nn.Linear(1024, 1024)])
def test_few_rows_are_cheaper_than_the_gradient(layer):
    assert all(taps(layer, FEW))


@pytest.mark.parametrize("layer", [nn.LSTM(512, 512), nn.GRU(512, 512), nn.RNN(1500, 1500)])
def test_of_many_rows_a_recurrent_layer_does_not_compute_its_gates_twice(layer):
    assert not any(taps(layer, MANY))


def test_of_many_rows_a_linear_layer_needs_no_gradient():
    assert all(taps(nn.Linear(1024, 1024), MANY))


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
