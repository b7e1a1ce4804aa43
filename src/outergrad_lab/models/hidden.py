"""What can be chosen of a model's hidden layers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

Activation = Callable[[], nn.Module]
"""Makes the module between two layers."""

ACTIVATIONS: dict[str, Activation] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "linear": nn.Identity,
    "gelu": nn.GELU,
}


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """The hidden layers of a model.

    Attributes:
        widths: Their features.
        activation: What goes between them; of no use to some models.
    """

    widths: tuple[int, ...]
    activation: Activation
