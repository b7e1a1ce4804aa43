"""Multilayer perceptrons."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from outergrad_lab.data.dataset import Format
from outergrad_lab.models.activations import Activation


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
