"""Weights of a graph's edges, as matrices whose products average over the sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outergrad.gossip.graphs import Edge


def metropolis(edges: Sequence[Edge]) -> dict[Edge, float]:
    """Returns the weight of each undirected edge, w_ij = 1 / (1 + max(d_i, d_j)), of degrees d.

    The matrix of these weights is symmetric and doubly stochastic on every graph, and stays so
    where edges are left out and the sites keep their weight for themselves. Source: Xiao, Boyd and
    Lall, "A scheme for robust distributed sensor fusion based on average consensus", 2005.
    """
    degree = Counter(site for edge in edges for site in edge)
    return {(i, j): 1 / (1 + max(degree[i], degree[j])) for i, j in edges}


def push_weights(edges: Sequence[Edge]) -> dict[Edge, float]:
    """Returns the share that a sender gives away by each directed edge: 1 / (1 + its edges out).

    It keeps as much for itself, so that the columns of the matrix add up to 1.
    """
    out = Counter(sender for sender, _ in edges)
    return {(i, j): 1 / (1 + out[i]) for i, j in edges}


def mixing_matrix(weights: Mapping[Edge, float], sites: int, *, directed: bool = False) -> Tensor:
    """Returns the matrix (S, S) that one exchange multiplies the sites' weights by, float64.

    The entry (i, j) is what site i takes of site j. What a site does not give away it keeps.

    Args:
        weights: by edge.
        sites: S.
        directed: whether the edges go from their first site to their second alone.
    """
    found = torch.zeros(sites, sites, dtype=torch.float64)
    for (i, j), weight in weights.items():
        found[j, i] = weight
        if not directed:
            found[i, j] = weight
    return found + torch.diag(1 - found.sum(dim=0))


def spectral_gap(matrix: Tensor) -> float:
    """Returns 1 minus the second largest magnitude of an eigenvalue: 1 after one exchange for all.

    The distance from the mean falls by (1 - gap) per exchange, at least. For a time-varying graph
    pass the product of the matrices of a period.

    Args:
        matrix: (S, S), of `mixing_matrix`.
    """
    if len(matrix) == 1:
        return 1.0
    sizes = torch.linalg.eigvals(matrix).abs().sort(descending=True).values
    return float(1 - sizes[1])
