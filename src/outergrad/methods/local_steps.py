"""Local steps: sites train by themselves for k steps, then share how their weights have changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from outergrad.core.protocols import Method
from outergrad.drift.on_drift import OnDrift
from outergrad.methods.common import is_method, require
from outergrad.methods.dense import Dense
from outergrad.methods.per_layer import PerLayer

Outer = Callable[[list[nn.Parameter]], Optimizer]
"""Function that makes an optimizer of a list of parameters."""


@runtime_checkable
class FollowsModel(Protocol):
    """Outer optimizer whose rule for a parameter depends on the module that has it."""

    def regroup(
        self, model: nn.Module, copies: Mapping[nn.Parameter, nn.Parameter]
    ) -> Iterable[nn.Parameter]:
        """Groups the parameters by their place in the model; called once, before the first step.

        Args:
            model: Model that is trained.
            copies: By the model's parameter, the one that this optimizer holds for it.

        Returns:
            Those of its parameters that it does not move by their mean change. Methods may keep no
            residual of these.
        """
        ...


def average(params: list[nn.Parameter]) -> Optimizer:
    """Returns an outer optimizer that sets the weights to their mean over the sites: SGD of rate 1.

    Args:
        params: weights that all sites had after the last exchange.
    """
    return SGD(params, lr=1.0)


def nesterov(params: list[nn.Parameter]) -> Optimizer:
    """Returns the outer optimizer of DiLoCo: SGD with Nesterov momentum.

    Choose it in long trainings whose rates were tuned with it. Within a few hundred steps it ends
    far above the plain mean on most models (docs/methods.md).

    Args:
        params: weights that all sites had after the last exchange.
    """
    return SGD(params, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True, repr=False)
class LocalSteps:
    """Every site makes k steps of its own; then all sites average the changes of their weights.

    Choose it where the link is too slow for an exchange per step, or often down.

    The change of the weights since the last exchange, `start - now`, is an "outer gradient". The
    outer optimizer applies its mean over the sites to `start`. The state of the inner optimizers
    stays on each site. By default the weights become their mean: federated averaging (McMahan et
    al., arXiv 1602.05629). With `outer=og.nesterov` it is DiLoCo (Douillard et al., arXiv
    2311.08105, algorithm 1), with `stream` and `overlap` besides Streaming DiLoCo (Douillard et
    al., arXiv 2501.18512, algorithm 2).

    Attributes:
        k: Steps of the optimizer between two exchanges (H in DiLoCo); or `og.OnDrift(...)`, to
            exchange whenever a site's data drift.
        outer: Makes the outer optimizer of a list of parameters, alike on all sites; if None it is
            SGD with a learning rate of 1, which makes the weights their mean. `og.nesterov` is
            DiLoCo's, `og.optim.OuterMuon` is for Muon inside. It is also called with a list of one
            parameter, to check it.
        method: How the change travels: `og.Dense()`; `og.RankDAD(...)` or `og.PowerSGD(...)` for
            weights at low rank and the rest dense; `og.Sparse(...)` for a few entries of weights;
            `og.PerLayer({...})` of these and `og.Local()`.
        stream: Number of fragments of the model, with about equal numbers of elements. They take
            turns: one is exchanged after every k / stream steps, each after every k. What a method
            limits per step, such as a budget, then applies to the exchange of one fragment.
        overlap: Steps that are made while an exchange travels; its result is applied after them.
            Less than k / stream; with 0 sites wait for it.
        alpha: Share of its own weights that a site keeps in an exchange, 0 or more and less than 1:
            the weights become `alpha * own + (1 - alpha) * shared`. By default 1/2 with `overlap`,
            so that the site's steps in the meantime are not lost, else 0.
        error_reset: True if a site keeps the unsent part of its changes in its own weights, and
            goes on from there. Choose it where the method leaves much unsent: low rank in few bits,
            or signs of random blocks (docs/fewest-bytes.md, "Under Muon").
            Sites then differ after an exchange, too, until `flush`. As in CSER (Xie et al., arXiv
            2007.13221).
        quorum: Least number of sites with which an exchange goes ahead, or, as a float up to 1.0,
            their least share. A site that is late is left out of it, keeps its change for the next
            one that it reaches, and takes over what the others agreed on. None: all are waited for.
            Choose it where sites differ in speed, or are away for a while.
        grace: Seconds that a quorum waits for late sites, with `quorum`.
    """

    k: int | OnDrift
    outer: Outer | None = field(default=None, kw_only=True)
    method: Method | PerLayer = field(default=Dense(), kw_only=True)
    stream: int = field(default=1, kw_only=True)
    overlap: int = field(default=0, kw_only=True)
    alpha: float | None = field(default=None, kw_only=True)
    error_reset: bool = field(default=False, kw_only=True)
    quorum: int | float | None = field(default=None, kw_only=True)
    grace: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        whole = type(self.k) is int and self.k >= 1
        remedy = "a whole number, 1 or more, or og.OnDrift(...)"
        require(whole or isinstance(self.k, OnDrift), self, "k", remedy)
        self._check_turns()
        self._check_quorum()
        _described(self._outer)
        methods: list[Any] = [self.method]
        if isinstance(self.method, PerLayer):
            if self.method.joint:
                raise ValueError(
                    "LocalSteps: PerLayer(joint=True) needs every backward: leave it out"
                )
            methods = list(self.method.methods.values())
        for method in methods:
            _check_method(method)
        if self.error_reset and not any(map(_owes, methods)):
            raise ValueError(
                f"LocalSteps: error_reset=True, but method={self.method!r} owes nothing: leave it "
                f"out, or use a method that sends less and has error feedback, as og.RankDAD(...)"
            )

    def _check_turns(self) -> None:
        if isinstance(self.k, OnDrift):
            self._check_drift()
        whole = type(self.stream) is int and self.stream >= 1
        remedy = f"a whole number, 1 or more, that divides k={self.k}"
        require(whole and self.fewest % self.stream == 0, self, "stream", remedy)
        fits = type(self.overlap) is int and 0 <= self.overlap < self.period
        remedy = f"a whole number, 0 or more and less than k / stream = {self.period}"
        require(fits, self, "overlap", remedy)
        number = self.alpha is None or type(self.alpha) in (int, float)
        require(number and 0 <= self.kept < 1, self, "alpha", "0 or more and less than 1")
        require(type(self.error_reset) is bool, self, "error_reset", "True or False")

    def _check_drift(self) -> None:
        own = {"stream": self.stream != 1, "overlap": self.overlap != 0}
        own |= {"quorum": self.quorum is not None}
        for name in [name for name, is_set in own.items() if is_set]:
            raise ValueError(
                f"LocalSteps: k=OnDrift(...) does not go with {name}={getattr(self, name)}: all "
                f"sites exchange the whole model at the drift; leave {name} out"
            )

    def _check_quorum(self) -> None:
        whole = type(self.quorum) is int and self.quorum >= 1
        share = type(self.quorum) is float and 0 < self.quorum <= 1
        remedy = "a number of sites, 1 or more, or their share, a float above 0 and up to 1.0"
        require(self.quorum is None or whole or share, self, "quorum", remedy)
        given = type(self.grace) in (int, float) and 0 <= self.grace < math.inf  # type: ignore[operator]
        if self.quorum is None:
            require(self.grace is None, self, "grace", "it with quorum=, or leave it out")
            return
        require(given, self, "grace", "the seconds that a quorum waits for late sites, 0 or more")
        own = {"stream": self.stream > 1, "overlap": self.overlap > 0}
        own |= {"alpha": self.alpha is not None, "error_reset": self.error_reset}
        for name in [name for name, is_set in own.items() if is_set]:
            raise ValueError(
                f"LocalSteps: quorum={self.quorum} does not go with {name}={getattr(self, name)}: "
                f"a late site keeps its change in its weights as a whole; leave {name} out"
            )

    def least(self, sites: int) -> int:
        """Returns the least number of sites of an exchange, of so many sites in all."""
        if self.quorum is None:
            return sites
        return self.quorum if isinstance(self.quorum, int) else math.ceil(self.quorum * sites)

    @property
    def fewest(self) -> int:
        """Fewest steps between two exchanges of the same weights."""
        return self.k.check if isinstance(self.k, OnDrift) else self.k

    @property
    def often(self) -> str:
        """Says in words when sites exchange."""
        if isinstance(self.k, OnDrift):
            return self.k.often
        return "every step" if self.k == 1 else f"every {self.k} steps"

    @property
    def period(self) -> int:
        """Fewest steps from the exchange of one fragment to that of the next."""
        return self.fewest // self.stream

    @property
    def kept(self) -> float:
        """Share of its own weights that a site keeps in an exchange: `alpha` or its default."""
        usual = 0.5 if self.overlap else 0.0
        return usual if self.alpha is None else self.alpha

    def __repr__(self) -> str:
        """Returns the same text on every site, because sites compare it."""
        turns: dict[str, tuple[float | None, float | None]] = {
            "stream": (self.stream, 1),
            "overlap": (self.overlap, 0),
            "alpha": (self.kept, 0),
            "error_reset": (self.error_reset, False),
            "quorum": (self.quorum, None),
            "grace": (self.grace, None),
        }
        more = "".join(f", {name}={v}" for name, (v, usual) in turns.items() if v != usual)
        return (
            f"LocalSteps({self.k}, outer={_described(self._outer)}, method={self.method!r}{more})"
        )

    def optimizer(self, params: Sequence[nn.Parameter]) -> Optimizer:
        """Returns a new outer optimizer."""
        return self._outer(list(params))

    @property
    def _outer(self) -> Outer:
        return average if self.outer is None else self.outer


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


def _owes(method: Any) -> bool:
    """True if the method keeps the unsent part of a change."""
    return method.compressor() is not None and bool(getattr(method, "error_feedback", True))


def _described(outer: Outer) -> str:
    """Returns the outer optimizer's type and those of its settings that are not zero or off.

    Raises:
        TypeError: `outer` does not make an optimizer.
    """
    made = outer([nn.Parameter(torch.zeros(1))]) if callable(outer) else None
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"LocalSteps: outer={outer!r}; use a function of a list of parameters that returns an "
            f"optimizer, as lambda params: torch.optim.SGD(params, lr=1.0)"
        )
    settings = ", ".join(f"{name}={value}" for name, value in made.defaults.items() if value)
    return f"{type(made).__name__}({settings})"
