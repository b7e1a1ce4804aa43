"""Recurrent layers that are computed again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import outergrad as og
from covering import covering
from replaying import assert_all_have, check, loss, train_seeded

RECURRENT = {
    "rnn": lambda: nn.RNN(6, 5, nonlinearity="relu"),
    "gru, 2 layers, bidirectional": lambda: nn.GRU(6, 5, 2, bidirectional=True),
    "lstm, 2 layers, bidirectional": lambda: nn.LSTM(6, 5, 2, bidirectional=True),
    "lstm, projections": lambda: nn.LSTM(6, 5, batch_first=True, proj_size=3),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("name", "sites", "packed"), covering(RECURRENT.keys(), [2, 3], [False, True], quick=2, every=2)
)
def test_recurrent_layers_are_replayed_by_raw_dad(name, sites, packed):
    torch.manual_seed(1)
    model = RECURRENT[name]()
    inputs = [torch.randn(4 + rank, 3 + rank, 6) for rank in range(sites)]
    if packed:
        lengths = [torch.randint(1, x.shape[0 - model.batch_first] + 1, ()) for x in inputs]
        inputs = [pack(x, n, model.batch_first) for x, n in zip(inputs, lengths, strict=True)]
    names = [n for n, _ in model.named_parameters()]
    check(model, og.DAD(reveal="activations", always=True), [(x,) for x in inputs], names)


def pack(x, shortest, batch_first):
    batch, time = x.shape[not batch_first], x.shape[batch_first]
    lengths = torch.linspace(time, min(int(shortest), time), batch).long().clamp(min=1).flip(0)
    return pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_recurrent_layers_is_drawn_again(kind, monkeypatch):
    torch.manual_seed(1)
    model = kind(6, 5, 3, dropout=0.3, bidirectional=True)
    inputs = [(torch.randn(4, 3 + rank, 6),) for rank in range(2)]
    found = train_seeded(monkeypatch, model, og.EDAD(always=True, inputs="raw"), inputs)
    whole = copy.deepcopy(model).double()
    for rank, (x,) in enumerate(inputs):
        torch.manual_seed(100 * rank)
        (loss(whole(x.double())) / 2).backward()
    assert_all_have(found, whole)


class HeadFirst(nn.Module):
    """Registers its layers in another order than it calls them in."""

    def __init__(self):
        super().__init__()
        self.head, self.lstm = nn.Linear(5, 4), nn.LSTM(6, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize("first", ["lstm", "head"])
def test_a_recurrent_layer_on_the_data_is_not_replayed_unasked(first):
    torch.manual_seed(1)
    model = nn.LSTM(6, 5) if first == "lstm" else HeadFirst()
    inputs = [(torch.randn(4, 3, 6),) for _ in range(2)]
    names = [n for n, _ in model.named_parameters() if "_l0" in n]
    for _, session in check(model, og.EDAD(always=True), inputs):
        lines = {line.parameter: line for line in session.coverage()}
        assert {lines[n].travels for n in names} == {"factors" if first == "lstm" else "dense"}
        if first == "head":
            assert "reads what enters the model" in lines["lstm.weight_ih_l0"].why
    check(model, og.EDAD(always=True, inputs="raw"), inputs, names)
