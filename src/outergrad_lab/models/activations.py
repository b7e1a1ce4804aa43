"""Activations between the layers of a model."""

from collections.abc import Callable

from torch import nn

Activation = Callable[[], nn.Module]
"""Makes the module between two layers."""

ACTIVATIONS: dict[str, Activation] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "linear": nn.Identity,
    "gelu": nn.GELU,
}
