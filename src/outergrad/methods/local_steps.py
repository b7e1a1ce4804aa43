"""Sites train by themselves for some steps; then they share how their weights have changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from outergrad.core.protocols import Method
from outergrad.methods.common import is_method, require
from outergrad.methods.dense import Dense
from outergrad.methods.per_layer import PerLayer

Outer = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer of a list of parameters."""


def nesterov(params: list[nn.Parameter]) -> Optimizer:
    """The outer optimizer of DiLoCo."""
    return SGD(params, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True, repr=False)
class LocalSteps:
    """Every site makes k steps of its own; then all go on from where these lead on average.

    Choose it where the link is too slow for an exchange per step, or only there now and then.

    What travels is the change of the weights since the last exchange, `start - now`: an "outer
    gradient", whose mean over the sites the outer optimizer applies to `start`. The state of the
    inner optimizers stays each site's own. Source: Douillard et al., DiLoCo, arXiv 2311.08105,
    algorithm 1; with `method=og.Dense()` and `outer=lambda params: SGD(params, lr=1)` it is
    federated averaging (McMahan et al., arXiv 1602.05629).

    Attributes:
        k: steps of the optimizer between two exchanges (H in DiLoCo).
        outer: makes the outer optimizer of a list of parameters, alike on all sites: by default
            SGD with a learning rate of 0.7 and Nesterov momentum of 0.9, as in DiLoCo. It is also
            called with a list of one parameter, to check it.
        method: how the change travels: `og.Dense()`; `og.RankDAD(...)` or `og.PowerSGD(...)` for
            weights at low rank and the rest dense; `og.Sparse(...)` for a few entries of weights;
            `og.PerLayer({...})` of these and `og.Local()`.
    """

    k: int
    outer: Outer = field(default=nesterov, kw_only=True)
    method: Method | PerLayer = field(default_factory=Dense, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the settings."""
        require(type(self.k) is int and self.k >= 1, self, "k", "a whole number, 1 or more")
        _described(self.outer)
        if not isinstance(self.method, PerLayer):
            _check_method(self.method)
            return
        if self.method.joint:
            raise ValueError("LocalSteps: PerLayer(joint=True) needs every backward: leave it out")
        for method in self.method.methods.values():
            _check_method(method)

    def __repr__(self) -> str:
        """The same on every site, as it is what the sites compare."""
        return f"LocalSteps({self.k}, outer={_described(self.outer)}, method={self.method!r})"

    def optimizer(self, params: Sequence[nn.Parameter]) -> Optimizer:
        """A new outer optimizer."""
        return self.outer(list(params))


def _check_method(method: Any) -> None:
    if isinstance(method, LocalSteps) or not is_method(method):
        raise TypeError(
            f"LocalSteps: method={method!r}; use og.Dense(), og.RankDAD(...), og.PowerSGD(...), "
            f"og.Sparse(...) or og.PerLayer({{...}}) of these"
        )
    if getattr(method, "every", 1) != 1:
        raise ValueError(f"LocalSteps: method={method!r}: k says how often; leave every=1")
    compressor = method.compressor()
    if compressor is not None and not compressor.takes_plain:
        raise ValueError(
            f"LocalSteps: method={method!r}: a change of the weights over several steps has no "
            f"factors that a backward could capture; use og.Dense() or og.RankDAD(...)"
        )


def _described(outer: Outer) -> str:
    """Its type and settings, without those that are zero or off.

    Raises:
        TypeError: it makes no optimizer.
    """
    made = outer([nn.Parameter(torch.zeros(1))]) if callable(outer) else None
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"LocalSteps: outer={outer!r}; use a function of a list of parameters that returns an "
            f"optimizer, as lambda params: torch.optim.SGD(params, lr=1.0)"
        )
    settings = ", ".join(f"{name}={value}" for name, value in made.defaults.items() if value)
    return f"{type(made).__name__}({settings})"
