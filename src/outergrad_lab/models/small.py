"""Small networks: multilayer perceptrons, convolutional and recurrent ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn
from torch.nn.functional import relu

from outergrad_lab.data.dataset import Format

Activation = Callable[[], nn.Module]
"""Makes the module between two layers."""

ACTIVATIONS: dict[str, Activation] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "linear": nn.Identity,
    "gelu": nn.GELU,
}


def mlp(widths: Sequence[int], activation: Activation = nn.ReLU) -> nn.Sequential:
    """Builds a multilayer perceptron.

    Args:
        widths: Features of the input, of each hidden layer and of the output.
        activation: Makes the module between two layers.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def build_mlp(format: Format, widths: Sequence[int], activation: Activation) -> nn.Sequential:
    """Builds a multilayer perceptron for rows of any shape, flattened."""
    layers = mlp((prod(format.shape), *widths, format.classes), activation)
    return layers if len(format.shape) == 1 else nn.Sequential(nn.Flatten(), *layers)


STEM = 16
STAGES = (16, 32, 64)


class ResidualBlock(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs, 3, 1), nn.BatchNorm2d(outputs)
        self.around = nn.Identity()
        if inputs != outputs or stride != 1:
            self.around = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (rows, inputs, height, width) to (rows, outputs, height/stride, width/stride)."""
        hidden = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(hidden)) + self.around(x))


def _conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    """Returns a convolution without bias, since a norm follows."""
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def build_cnn(format: Format, *_hidden: object) -> nn.Sequential:
    """Builds a network of 14 layers: a stem, three stages of two blocks each, a head."""
    stem = (_conv(format.shape[0], STEM, 3, 1), nn.BatchNorm2d(STEM), nn.ReLU())
    blocks = [
        block
        for stage, (inputs, outputs) in enumerate(pairwise((STEM, *STAGES)))
        for block in _stage(inputs, outputs, stride=2 if stage else 1)
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(STAGES[-1], format.classes))
    return nn.Sequential(*stem, *blocks, *head)


def _stage(inputs: int, outputs: int, stride: int) -> tuple[ResidualBlock, ResidualBlock]:
    return ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)


def build_two_convolutions(format: Format, widths: Sequence[int], *_more: object) -> nn.Sequential:
    """Builds the network of federated averaging, with norms that keep no running statistics.

    It has two convolutions of 5 x 5, each with group normalisation and max pooling by 2, and a
    hidden layer. The paper (McMahan et al., arXiv 1602.05629, section 3) has widths 32, 64 and
    512, and no norms. Group norms are the same in training and in testing, and whole on every site.

    Args:
        format: Form of the images, whose height and width are multiples of 4.
        widths: Channels of both convolutions, multiples of 8, and features of the hidden layer.
    """
    (channels, height, width), (first, second, hidden) = format.shape, widths
    pixels = (height // 4) * (width // 4)
    return nn.Sequential(
        *_halving(channels, first),
        *_halving(first, second),
        nn.Flatten(),
        nn.Linear(second * pixels, hidden),
        nn.ReLU(),
        nn.Linear(hidden, format.classes),
    )


def _halving(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    norm = nn.GroupNorm(outputs // 8, outputs)
    return _conv(inputs, outputs, 5, 1), norm, nn.ReLU(), nn.MaxPool2d(2)


def build_plain_convolutions(
    format: Format, widths: Sequence[int], activation: Activation
) -> nn.Sequential:
    """Builds two strided convolutions and a hidden layer, without norms.

    It is the network of papers on differential privacy (Papernot et al., arXiv 2007.14191, table
    1), which has widths 16, 32 and 32, and tanh.

    Args:
        format: Form of the images, of 14 x 14 pixels at least.
        widths: Channels of both convolutions, and features of the hidden layer.
        activation: Makes the module behind each of them.
    """
    (channels, *sides), (first, second, hidden) = format.shape, widths
    pixels = prod((side // 2 - 5) // 2 for side in sides)
    return nn.Sequential(
        nn.Conv2d(channels, first, 8, stride=2, padding=3),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(first, second, 4, stride=2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(second * pixels, hidden),
        activation(),
        nn.Linear(hidden, format.classes),
    )


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
