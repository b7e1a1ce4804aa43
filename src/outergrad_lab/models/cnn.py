"""Networks for images: a small residual one, and the one of federated averaging."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from outergrad_lab.data.dataset import Format

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
