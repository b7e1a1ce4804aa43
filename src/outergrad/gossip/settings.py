"""The settings of `og.Gossip`: who talks with whom, in which way, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

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
            fewer bytes, or over a directed graph `og.gossip.SparsePush(...)`.
        every: k, steps of the optimizer between two exchanges.
        rounds: Rounds of an exchange: the weights are averaged so often in a row. More bring the
            sites nearer to each other.
    """

    graph: str | Path | Graph
    method: GossipMethod | SparsePush | None = None
    every: int = field(default=1, kw_only=True)
    rounds: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the settings, and looks up the graph.

        Raises:
            ValueError: names the setting and its valid values.
            TypeError: the graph or the method is none.
        """
        object.__setattr__(self, "graph", graph_of(self.graph))
        for name in ("every", "rounds"):
            value = getattr(self, name)
            require(type(value) is int and value >= 1, self, name, "a whole number, 1 or more")
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
        if (
            self.way.directed
            and not pushes
            and not (isinstance(self.how, Whole) and self.how.gamma <= 1)
        ):
            raise ValueError(
                f"Gossip: graph={self.graph!r} is directed, and method={self.method!r} needs edges "
                f"that go both ways: use None to send all weights, og.gossip.SparsePush(...), or a "
                f"graph without directed=True"
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
