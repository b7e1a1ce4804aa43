"""Models by name."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn


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


MODELS: dict[str, Callable[[Sequence[int]], nn.Module]] = {"mlp": mlp}
