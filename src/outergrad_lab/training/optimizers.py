"""Optimizers that a job can ask for."""

from collections.abc import Callable, Iterable
from functools import partial

from torch import nn
from torch.optim import SGD, Adam, Optimizer

ADAM_EPS = 1e-6
"""Above the rounding noise of a gradient: Adam makes whole steps of what is larger than eps."""

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(Adam, eps=ADAM_EPS),
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
}
"""Each takes the parameters and `lr=`; "sgd" is without momentum."""


def optimizer_of(name: str, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """The optimizer of a name, a key of `OPTIMIZERS`."""
    return OPTIMIZERS[name](parameters, lr=lr)
