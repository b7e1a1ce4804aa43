"""Recurrent networks that classify sequences."""

from collections.abc import Sequence

from torch import Tensor, nn

from outergrad_lab.data.dataset import Format
from outergrad_lab.models.activations import Activation
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


def build_recurrent(
    kind: type[nn.GRU | nn.LSTM], format: Format, widths: Sequence[int], activation: Activation
) -> LastState:
    """Builds one recurrent layer with ``widths[0]`` hidden features.

    A second width is that of a layer between the recurrent one and the head.
    """
    (_, features), (width, *between) = format.shape, widths
    recurrent = kind(features, width, batch_first=True)
    head = mlp((width, *between, format.classes), activation)
    return LastState(recurrent, head if between else head[0])
