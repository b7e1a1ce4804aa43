"""A small residual network with batch normalisation."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from outergrad_lab.data.dataset import Format

STEM = 16
STAGES = (16, 32, 64)


class ResidualBlock(nn.Module):
    """Two convolutions and a way around them."""

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
    """A convolution without bias, since a norm follows."""
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
