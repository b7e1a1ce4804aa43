"""Training without a centre: graphs of sites, and what neighbours tell each other."""

from outergrad.gossip.choco import Choco
from outergrad.gossip.ends import End, GossipMethod, Memory, Weights, Whole
from outergrad.gossip.graphs import (
    Complete,
    EdgeList,
    Exponential,
    Graph,
    Lossy,
    RandomPairs,
    Ring,
    Torus,
    edge_list,
)
from outergrad.gossip.mixing import metropolis, mixing_matrix, push_weights, spectral_gap
from outergrad.gossip.power import PowerGossip
from outergrad.gossip.push import SparsePush
from outergrad.gossip.reductions import LowRank, RandomK, Reduction

__all__ = [
    "Choco",
    "Complete",
    "EdgeList",
    "End",
    "Exponential",
    "GossipMethod",
    "Graph",
    "Lossy",
    "LowRank",
    "Memory",
    "PowerGossip",
    "RandomK",
    "RandomPairs",
    "Reduction",
    "Ring",
    "SparsePush",
    "Torus",
    "Weights",
    "Whole",
    "edge_list",
    "metropolis",
    "mixing_matrix",
    "push_weights",
    "spectral_gap",
]
