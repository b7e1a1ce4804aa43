"""The settings of `og.Gossip`: who talks with whom, in which way, and how often."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from outergrad.drift.on_drift import OnDrift
from outergrad.gossip.ends import GossipMethod, Whole
from outergrad.gossip.graphs import Graph, graph_of
from outergrad.gossip.push import SparsePush
from outergrad.methods.common import require


@dataclass(frozen=True)
class Gossip:
    """Every site trains by itself and averages its weights with its neighbours': no centre.

    Choose it where no all-reduce over all sites is wanted: links are few or unequal, or a site that
    is away must not stop the others. On even data and a fast link `og.LocalSteps` learns as much in
    fewer bytes (docs/gossip.md).

    After every k-th step of its optimizer a site tells its neighbours of its weights, and moves
    towards theirs: x_i := x_i + Σ_j w_ij (x_j - x_i), with Metropolis weights. Every exchange of
    two sites moves both by the same amount in opposite directions, so the mean over all sites
    changes by rounding alone. Sites differ all through the training; `session.average()` gives all
    of them the mean. Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized
    Algorithms?", arXiv 1705.09056.

    Over a directed graph sites push shares of their weights along its edges, and of a mass by which
    these count (push-sum, arXiv 1811.10792). The model has their quotient, and the mean over all
    sites is that of both sums.

    A neighbour that does not answer within `timeout=` of `og.distribute` is left out until it is
    heard again; what it then said late still counts, so that nothing is lost (docs/gossip.md).

    Attributes:
        graph: "ring", "torus", "complete", "exponential" (one peer per step), "random" (pairs drawn
            anew), the path of a file of edges, or a graph of `og.gossip`.
        method: None to send all weights; `og.gossip.PowerGossip(...)` or `og.gossip.Choco(...)` for
            fewer bytes; `og.gossip.SparsePush(...)` for fewer over a directed graph.
        every: k, steps of the optimizer between two exchanges.
        rounds: Rounds of an exchange: the weights are averaged so often in a row. More bring the
            sites nearer to each other.
        lr: η, rate of what a site's own steps have changed since the last exchange: before it tells
            of its weights they become `start + lr (now - start)`.
        momentum: γ, 0 or more and less than 1: how much of the change from the last exchange's
            weights to these is made once more. Choose it in place of the optimizer's own momentum
            where sites have other classes than their neighbours, or beside it with `every`. With
            `lr` the mean over sites goes as by SGD with Nesterov's momentum on the sites' mean
            change, which `og.LocalSteps` has as `outer`. Source: GASLoC, arXiv 2606.11081.
        overlap: Steps that are made while letters travel, up to `every`; what they tell moves this
            site after them. 0: it waits. Choose it where a link is slow. Source: the mixing of
            weights in Factored Gossip DiLoCo, arXiv 2606.22768.
        clip: C, the L2 norm of a difference of two neighbours' weights, all together, up to which
            an exchange counts whole; a longer one is scaled to it, at both. So a neighbour that
            lies moves a site by C times the weight of their edge per exchange, and the log names
            it. None for no bound. Take some times the `session.stats().neighbour_distance` of a
            good training: a C below it slows agreement. Source: He, Karimireddy and Jaggi,
            "Byzantine-Robust Decentralized Learning via ClippedGossip", arXiv 2202.01545.
    """

    graph: str | Path | Graph
    method: GossipMethod | SparsePush | None = None
    every: int = field(default=1, kw_only=True)
    rounds: int = field(default=1, kw_only=True)
    lr: float = field(default=1.0, kw_only=True)
    momentum: float = field(default=0.0, kw_only=True)
    overlap: int = field(default=0, kw_only=True)
    clip: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the settings, and looks up the graph.

        Raises:
            ValueError: names the setting and its valid values.
            TypeError: the graph or the method is none.
        """
        object.__setattr__(self, "graph", graph_of(self.graph))
        if isinstance(self.every, OnDrift):
            raise ValueError(
                "Gossip: every=og.OnDrift(...) needs a vote of all sites, which neighbours alone "
                "do not have: use a whole number, or og.LocalSteps(og.OnDrift(...))"
            )
        for name in ("every", "rounds"):
            value = getattr(self, name)
            require(type(value) is int and value >= 1, self, name, "a whole number, 1 or more")
        self._check_outer()
        bounded = self.clip is None or (isinstance(self.clip, (int, float)) and self.clip > 0)
        require(bounded, self, "clip", "a number above 0, or None for no bound")
        pushes = isinstance(self.method, SparsePush)
        two_way = not isinstance(self.method, type) and callable(getattr(self.how, "end", None))
        if not pushes and not two_way:
            raise TypeError(
                f"Gossip: method={self.method!r}; use None to send all weights, "
                f"og.gossip.PowerGossip(...), og.gossip.Choco(...) or og.gossip.SparsePush(...)"
            )
        if pushes and not self.way.directed:
            raise ValueError(
                f"Gossip: method={self.method!r} goes along directed edges, and graph="
                f"{self.graph!r} has none: use a graph with directed=True, or og.gossip.Choco(...)"
            )
        if self.way.directed:
            self._check_directed()

    def _check_directed(self) -> None:
        if not isinstance(self.method, SparsePush) and not (
            isinstance(self.how, Whole) and self.how.gamma <= 1
        ):
            raise ValueError(
                f"Gossip: graph={self.graph!r} is directed, and method={self.method!r} needs edges "
                f"that go both ways: use None to send all weights, og.gossip.SparsePush(...), or a "
                f"graph without directed=True"
            )
        own = {"clip": None, "lr": 1, "momentum": 0, "overlap": 0}
        for name in (name for name, usual in own.items() if getattr(self, name) != usual):
            raise ValueError(
                f"Gossip: {name}={getattr(self, name)!r} is for edges that go both ways, and graph="
                f"{self.graph!r} is directed: leave {name}= out, or use a graph without "
                f"directed=True"
            )

    def _check_outer(self) -> None:
        rate = type(self.lr) in (int, float) and 0 < self.lr < math.inf
        require(rate, self, "lr", "a number above 0")
        share = type(self.momentum) in (int, float) and 0 <= self.momentum < 1
        require(share, self, "momentum", "a number, 0 or more and less than 1")
        steps = type(self.overlap) is int and 0 <= self.overlap <= self.every
        require(steps, self, "overlap", f"a whole number from 0 to every={self.every}")
        if self.overlap and self.rounds > 1:
            raise ValueError(
                f"Gossip: overlap={self.overlap} does not go with rounds={self.rounds}, of which "
                f"each begins with what the last one has told: leave one of them out"
            )

    @property
    def way(self) -> Graph:
        """The graph."""
        return self.graph  # type: ignore[return-value]

    @property
    def how(self) -> GossipMethod:
        """The method of exchanges both ways, or its default."""
        return Whole() if self.method is None else self.method  # type: ignore[return-value]

    @property
    def pushing(self) -> Whole | SparsePush:
        """The method of a directed graph, or its default."""
        return self.how  # type: ignore[return-value]
