"""The check that an outer momentum lets sites agree on their graph, and does not part them."""

from __future__ import annotations

import math

import torch

from outergrad.gossip.ends import Whole
from outergrad.gossip.graphs import Graph
from outergrad.gossip.mixing import metropolis
from outergrad.gossip.settings import Gossip

_STEPS = 200
_COLUMNS = 4
_TENTHS = 10
_MOST_OF_PARTS = 0.5


def growth(
    graph: Graph, sites: int, momentum: float, *, gamma: float = 1.0, rounds: int = 1
) -> float:
    """Returns the factor per exchange of how far apart sites are, in the long run.

    It is that of y := W y + momentum (y - last y), with W the mixing matrix of the step, found by
    some hundred steps from random weights. Where W is the same in every step it is below 1. Where
    the edges change from step to step, a large momentum may let it exceed 1: sites then part,
    though each W alone would bring them together.

    Args:
        graph: the graph.
        sites: S.
        momentum: γ.
        gamma: share of a difference that an exchange removes, of the method.
        rounds: rounds of an exchange.
    """
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    last_SC, y_SC = torch.randn(2, sites, _COLUMNS, **draw)
    logarithm = 0.0
    for step in range(_STEPS):
        mixed_SC = y_SC
        for one in range(step * rounds, (step + 1) * rounds):
            mixed_SC = _mixed(mixed_SC, graph, sites, one, gamma)
        last_SC, y_SC = y_SC, mixed_SC + momentum * (y_SC - last_SC)
        # Rounding brings back a mean, which mixing leaves as it is.
        last_SC, y_SC = last_SC - last_SC.mean(dim=0), y_SC - y_SC.mean(dim=0)
        size = float(torch.stack([y_SC, last_SC]).norm())
        if not size:
            return 0.0
        if step >= _STEPS // 2:
            logarithm += math.log(size)
        last_SC, y_SC = last_SC / size, y_SC / size
    return math.exp(logarithm / (_STEPS - _STEPS // 2))


def _mixed(x_SC: torch.Tensor, graph: Graph, sites: int, step: int, gamma: float) -> torch.Tensor:
    weights = metropolis(graph.edges(sites, step))
    if not weights:
        return x_SC
    first, second = torch.tensor([*weights]).T
    shares = gamma * torch.tensor([*weights.values()], dtype=torch.float64)[:, None]
    moves = shares * (x_SC[second] - x_SC[first])
    return x_SC.index_add(0, first, moves).index_add(0, second, -moves)


def refuse_parting(method: Gossip, sites: int) -> None:
    """Checks that momentum does not drive sites apart.

    Where whole weights travel and the edges are the same in every step none below 1 does:
    z² - (λ + γ) z + γ has its roots inside the unit circle for every eigenvalue λ of W between -1
    and 1. A method that tells of a part moves other directions in each step: λ of a direction is
    below 1 in some steps and 1 in the others. With a γ above 1/2 there are sequences of λ = 0 and
    λ = 1 by which sites part. So no more is let through; with 1/2 trainings went well
    (docs/gossip.md).

    Raises:
        ValueError: it does, on this graph of so many sites.
    """
    if not method.momentum or sites == 1:
        return
    if not isinstance(method.how, Whole) and method.momentum > _MOST_OF_PARTS:
        raise ValueError(
            f"og.Gossip: momentum={method.momentum} may drive sites apart where {method.method!r} "
            f"tells of a part of the weights: use momentum={_MOST_OF_PARTS} or less, or no method="
        )
    if method.way.period(sites) == 1:
        return

    def parts(momentum: float) -> bool:
        about = {"gamma": method.how.gamma, "rounds": method.rounds}
        return growth(method.way, sites, momentum, **about) > 1

    if parts(method.momentum):
        below = range(math.ceil(_TENTHS * method.momentum) - 1, 0, -1)
        good = next((tenth / _TENTHS for tenth in below if not parts(tenth / _TENTHS)), None)
        less = "no momentum=" if good is None else f"momentum={good} or less"
        raise ValueError(
            f"og.Gossip: momentum={method.momentum} drives {sites} sites apart on the graph "
            f"{method.graph!r}: use {less}, or a graph whose edges are the same in every step, as "
            f"'ring'"
        )
