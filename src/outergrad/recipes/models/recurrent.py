"""Recurrent networks that classify sequences."""

from typing import Any

from torch import Tensor, nn

from outergrad.recipes.data.dataset import Format


class LastState(nn.Module):
    """A recurrent layer whose output after the last step is classified."""

    def __init__(self, recurrent: nn.GRU | nn.LSTM, classes: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.head = nn.Linear(recurrent.hidden_size, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps sequences (rows, steps, features) to logits (rows, classes)."""
        states, _ = self.recurrent(x)
        return self.head(states[:, -1])


def build_gru(format: Format, widths: tuple[int, ...]) -> LastState:
    """Builds a GRU of one layer with ``widths[0]`` hidden features."""
    return _build(nn.GRU, format, *widths)


def build_lstm(format: Format, widths: tuple[int, ...]) -> LastState:
    """Builds an LSTM of one layer with ``widths[0]`` hidden features."""
    return _build(nn.LSTM, format, *widths)


def _build(kind: Any, format: Format, hidden: int) -> LastState:
    _, features = format.shape
    return LastState(kind(features, hidden, batch_first=True), format.classes)
