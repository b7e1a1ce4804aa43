"""Optimizers of a job, by name."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

ADAM_EPS = 1e-6
"""Above the rounding noise of a gradient: Adam makes whole steps of what is larger than eps."""


class Sign(Optimizer):
    """Moves every weight by the learning rate, against the sign of its gradient.

    Source: Bernstein et al., signSGD, arXiv 1802.04434; it has no momentum.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # PyTorch says None or float
        """Moves the weights that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())
        return loss


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(Adam, eps=ADAM_EPS),
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "sign": Sign,
}
"""Constructors that take the parameters and `lr=`; "sgd" and "sign" are without momentum."""


def optimizer_of(name: str, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """Returns the optimizer of a name, a key of `OPTIMIZERS`."""
    return OPTIMIZERS[name](parameters, lr=lr)
