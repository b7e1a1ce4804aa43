"""Recurrent cells refuse what PyTorch's refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outergrad as og

CELLS = {
    "rnn": nn.RNNCell(6, 5),
    "gru": nn.GRUCell(6, 5),
    "lstm": nn.LSTMCell(6, 5),
}


def untapped(y, a, slot=0, **about):
    return y


@pytest.mark.parametrize("name", CELLS)
def test_what_is_no_batch_of_rows_is_refused(name):
    cell, x = CELLS[name], torch.randn(2, 3, 6)
    with pytest.raises(ValueError, match="1D or 2D"):
        cell(x)
    with pytest.raises(ValueError, match=r"1-D or 2-D, not \(2, 3, 6\)"):
        og.RULES[type(cell)].forward(cell, untapped, x)


@pytest.mark.parametrize("shapes", [((3, 6), (1, 5)), ((3, 6), (5,)), ((1, 6), (3, 5))])
@pytest.mark.parametrize("name", CELLS)
def test_a_state_of_another_shape_is_refused(name, shapes):
    cell, (x, h) = CELLS[name], (torch.randn(shape) for shape in shapes)
    hx = (h, h) if name == "lstm" else h
    with pytest.raises(RuntimeError):
        cell(x, hx)
    with pytest.raises(RuntimeError, match="the state must be"):
        og.RULES[type(cell)].forward(cell, untapped, x, hx)
