"""Sites that gossip, each with weights of its own in float64."""

from __future__ import annotations

import threading

import torch
from torch.optim import SGD

import outergrad as og
from sites_apart import model, train


class Site:
    """A distributed model in float64, its optimizer and its session."""

    def __init__(self, method, rank, group, lr=0.1, momentum=0.0, **settings):
        self.rank, self.model = rank, model().double()
        self.session = og.distribute(self.model, method, group=group, **settings)
        self.optimizer = SGD(self.model.parameters(), lr=lr, momentum=momentum)

    def steps(self, start, stop):
        train(self.model, [self.optimizer], self.rank, range(start, stop))
        return self

    @torch.no_grad()
    def differ(self):
        """Gives every site weights of its own, by a change that no other site makes."""
        generator = torch.Generator().manual_seed(self.rank)
        for p in self.model.parameters():
            p.sub_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        return self.weights()

    def settle(self):
        """Waits for late sites as long as they need."""
        self.session._updates._at.comm.patience_s = 10.0
        self.session._updates._part.settle()

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


class Late:
    """Makes one site late, once: after some step it waits until it is let go."""

    def __init__(self):
        self.go = threading.Event()

    def wait(self):
        assert self.go.wait(15)


def flat(weights):
    return torch.cat([w.view(-1) for w in weights])
