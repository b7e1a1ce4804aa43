"""Settings of one training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from math import cos, pi
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from outergrad.launch.errors import RecipeError
from outergrad.optim import Muon, muon_groups
from outergrad.tools.named_methods.attach import did_you_mean
from outergrad_lab.data import SOURCES
from outergrad_lab.models import MODELS, require_fit
from outergrad_lab.models.small import ACTIVATIONS
from outergrad_lab.peers.named import attach_of
from outergrad_lab.training.split import SPLITS

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
    "muon": partial(Muon, eps=ADAM_EPS),
    "muon-0.9": partial(Muon, eps=ADAM_EPS, momentum=0.9),
    "muon-bf16": partial(Muon, eps=ADAM_EPS, dtype=torch.bfloat16),
}
"""Constructors that take the parameters and `lr=`.

"sgd" and "sign" are without momentum; that of "muon" is 0.95.
"""


def optimizer_of(name: str, model: nn.Module, lr: float) -> Optimizer:
    """Returns the optimizer of a name, a key of `OPTIMIZERS`, for a model that is trained whole."""
    params = muon_groups(model) if name.startswith("muon") else model.parameters()
    return OPTIMIZERS[name](params, lr=lr)


def decayed(optimizer: Optimizer, steps: int, share: float) -> LambdaLR:
    """Returns a schedule that lowers the learning rate by half a cosine, to a share of itself."""

    def factor(step: int) -> float:
        return share + (1 - share) * (1 + cos(pi * min(step / steps, 1))) / 2

    return LambdaLR(optimizer, factor)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, with the same settings at every site.

    Attributes:
        data: A key of `SOURCES`.
        model: A key of `MODELS`.
        method: A name that `attach_of` knows.
        sites: Number of sites that share the data.
        split: A key of `SPLITS`: which rows a site holds.
        epochs: Passes over the data.
        batch_size: Rows per site and step; their mean, where sites hold more or less.
        lr: Learning rate of the optimizer.
        optimizer: A key of `OPTIMIZERS`.
        decay: Share of the learning rate at the end, reached by a cosine; 1 for a constant rate.
        seed: Seed of the weights, the split and the order of the rows.
        widths: Features of the hidden layers; the model's own default if None.
        activation: A key of `ACTIVATIONS`; the model's own if None.
        local: Patterns of parameters that each site keeps to itself.
        joint: Whether the mean delta of all sites flows back into these.
    """

    data: str = "digits"
    model: str = "mlp"
    method: str = "dad"
    sites: int = 2
    split: str = "even"
    epochs: int = 5
    batch_size: int = 32
    lr: float = 1e-3
    optimizer: str = "adam"
    decay: float = 1.0
    seed: int = 0
    widths: tuple[int, ...] | None = None
    activation: str | None = None
    local: tuple[str, ...] = ()
    joint: bool = False

    def __post_init__(self) -> None:
        """Checks every value.

        Raises:
            RecipeError: One is not allowed; the error names its option.
        """
        for name, known in _CHOICES.items():
            chosen = getattr(self, name)
            right = chosen in known or (name == "activation" and chosen is None)
            require(right, name, f"one of {', '.join(known)}", self, known)
        attach_of(self.method, local=self.local, joint=self.joint)
        for name in ("sites", "epochs", "batch_size", "lr"):
            require(getattr(self, name) > 0, name, "above 0", self)
        require(0 <= self.decay <= 1, "decay", "from 0 to 1", self)
        require(self.seed >= 0, "seed", "0 or above", self)
        require(all(width > 0 for width in self.widths or ()), "widths", "above 0", self)
        require_fit(self.model, SOURCES[self.data].format, self.widths, self.activation)

    def first_difference(self, other: Job) -> str | None:
        """Returns the name of the first field in which two jobs differ, if any."""
        names = (field.name for field in fields(self))
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)


_CHOICES: dict[str, Iterable[str]] = {
    "data": SOURCES,
    "model": MODELS,
    "split": SPLITS,
    "optimizer": OPTIMIZERS,
    "activation": ACTIVATIONS,
}


def require(
    holds: bool, name: str, wanted: str, settings: object, known: Iterable[str] = ()
) -> None:
    """Raises `RecipeError` that names a field's option, unless its condition `holds`."""
    if not holds:
        value = getattr(settings, name)
        close = did_you_mean(str(value), [*known])
        raise RecipeError(f"{option(name)} must be {wanted}, not {value!r}{close}")


def option(name: str) -> str:
    """Returns the command line option of a field."""
    return "--" + name.replace("_", "-")
