"""Multilayer perceptrons."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

from torch import nn

from outergrad.recipes.data.dataset import Format


def mlp(widths: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Builds a multilayer perceptron.

    Args:
        widths: Features of the input, of each hidden layer and of the output.
        activation: Makes the module between two layers.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def build_mlp(format: Format, widths: tuple[int, ...]) -> nn.Sequential:
    """Builds one for rows of any shape, flattened; ``widths`` are the hidden layers'."""
    layers = mlp((prod(format.shape), *widths, format.classes))
    return layers if len(format.shape) == 1 else nn.Sequential(nn.Flatten(), *layers)
