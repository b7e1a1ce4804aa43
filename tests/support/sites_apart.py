"""Sites that step by themselves: a small model, batches of each site, methods for its change."""

from __future__ import annotations

import copy

import torch
from torch.optim import SGD, Adam

import outergrad as og
from cases import mlp
from outergrad.optim import Muon

FULL_RANK = {
    "dense": og.Dense(),
    "rank-dad": og.RankDAD(rank=1000, min_ratio=1),
    "rank-dad, merged": og.RankDAD(rank=1000, reduce="two_way"),
    "rank-dad, all-reduced": og.RankDAD(rank=1000, reduce="all_reduce"),
    "powersgd": og.PowerSGD(rank=1000, min_ratio=1),
    "sparse": og.Sparse(density=1.0, always=True),
    "sparse, added up": og.Sparse(density=1.0, select="random_blocks", always=True),
    "one per layer": og.PerLayer({"0.*": og.RankDAD(rank=1000), "*": og.Dense()}),
}
LOW_RANK = {
    "rank-dad": og.RankDAD(rank=1),
    "rank-dad, merged": og.RankDAD(rank=1, reduce="two_way"),
    "powersgd": og.PowerSGD(rank=1, min_ratio=1),
    "sparse": og.Sparse(density=0.1, always=True),
}
INNER = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: Adam(params, lr=0.01, eps=1e-4),
    "muon": lambda params: Muon(params, lr=0.01, eps=1e-4),
}


def plain(params):
    return SGD(params, lr=1.0)


def nesterov(params):
    return SGD(params, lr=0.7, momentum=0.9, nesterov=True)


torch.manual_seed(0)
ORIGINAL = mlp(6, 9, 8, 5)


def model():
    """The same everywhere: ranks in threads share one random stream."""
    return copy.deepcopy(ORIGINAL)


def batch(rank, number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4 + rank, 6, generator=generator).to(dtype)


def loss(y):
    return (y * y).mean() + y.sin().mean()


def train(net, optimizers, rank, numbers):
    """The user's loop; returns the model."""
    for number in numbers:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(net(batch(rank, number, next(net.parameters()).dtype))).backward()
        for optimizer in optimizers:
            optimizer.step()
    return net


class Site:
    """A distributed model, its optimizer and its session."""

    def __init__(self, method, rank, group, inner="sgd", **settings):
        self.rank, self.model = rank, model()
        self.session = og.distribute(self.model, method, group=group, **settings)
        self.optimizer = INNER[inner](self.model.parameters())

    def steps(self, start, stop):
        train(self.model, [self.optimizer], self.rank, range(start, stop))
        return self

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]
