"""Recurrent networks that classify sequences."""

from typing import Any

from torch import Tensor, nn

from outergrad_lab.data.dataset import Format
from outergrad_lab.models.hidden import Hidden
from outergrad_lab.models.mlp import mlp


class LastState(nn.Module):
    """A recurrent layer whose output after the last step is classified."""

    def __init__(self, recurrent: nn.GRU | nn.LSTM, head: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Maps sequences (rows, steps, features) to logits (rows, classes)."""
        states, _ = self.recurrent(x)
        return self.head(states[:, -1])


def build_gru(format: Format, hidden: Hidden) -> LastState:
    """Builds a GRU of one layer with ``widths[0]`` hidden features."""
    return _build(nn.GRU, format, hidden)


def build_lstm(format: Format, hidden: Hidden) -> LastState:
    """Builds an LSTM of one layer with ``widths[0]`` hidden features."""
    return _build(nn.LSTM, format, hidden)


def _build(kind: Any, format: Format, hidden: Hidden) -> LastState:
    """Another width is that of a layer between the recurrent one and the head."""
    (_, features), (width, *between) = format.shape, hidden.widths
    recurrent = kind(features, width, batch_first=True)
    head = mlp((width, *between, format.classes), hidden.activation)
    return LastState(recurrent, head if between else head[0])
