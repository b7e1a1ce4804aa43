"""How gradients that travel dense are divided into messages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.comm.torch import TorchComm
from ranks import run_ranks

KIB = 256
"""Elements of float32."""
TOLD = 2
"""Numbers behind each sum, about the sites."""


@pytest.fixture
def events(monkeypatch):
    """The elements of each sum that rank 0 starts, in their order."""
    found, reduce = [], TorchComm.all_reduce

    def all_reduce(comm, t):
        if comm.rank == 0:
            found.append(len(t) - TOLD)
        return reduce(comm, t)

    monkeypatch.setattr(TorchComm, "all_reduce", all_reduce)
    return found


class Some(nn.Module):
    """Matrices of so many KiB each, of which the last has its gradient first."""

    def __init__(self, sizes):
        super().__init__()
        self.ps = nn.ParameterList(nn.Parameter(torch.zeros(size, KIB)) for size in sizes)

    def forward(self):
        return sum((p.sum() for p in self.ps), torch.zeros(()))


@pytest.mark.parametrize(
    ("sizes", "sums"),
    [
        ([64, 512], [576]),
        ([512, 1024], [1024, 512]),
        ([255, 1024], [1279]),
        ([100, 155, 1024], [1279]),
        ([256, 1024], [1024, 256]),
        ([100, 156, 1024], [1024, 256]),
        ([16, 26 << 10, 1024], [1024, 26 << 10, 16]),
        ([1024] * 6, [1024, 2048, 2048, 1024]),
        ([1024] * 48, [1024, *[3072] * 15, 2048]),
    ],
    ids=str,
)
def test_the_first_bucket_is_small_and_takes_few_that_are_left(events, sizes, sums):
    share_ones(sizes, sites=2)
    assert events[-len(sums) :] == [size * KIB for size in sums]


def share_ones(sizes, sites):
    """A backward in which every gradient is to be one."""

    def body(rank, group):
        model = Some(sizes)
        session = og.distribute(model, og.Dense(), group=group)
        model().backward()
        session.detach()
        return all(p.grad.eq(1).all() for p in model.parameters())

    assert all(run_ranks(sites, body))


@pytest.mark.parametrize(
    ("sites", "sums"),
    [(2, [1024, *[2048] * 5, 1024]), (3, [1024, 4096, 4096, 3072]), (4, [1024, 6144, 5120])],
)
def test_a_sum_of_more_sites_is_longer_for_it_goes_round_a_longer_ring(events, sites, sums):
    share_ones([1024] * 12, sites)
    assert events[-len(sums) :] == [size * KIB for size in sums]


class NormBefore(nn.Module):
    """A norm that is registered behind the layer that it comes before, as of transformers.

    Args:
        events: is told when backward reaches the norm.
    """

    def __init__(self, events):
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)
        self.norm, self.events = nn.LayerNorm(512), events

    def forward(self, x):
        y = self.norm(self.first(x))
        y.register_hook(lambda _: self.events.append("norm"))
        return self.second(y).sum()


def test_a_message_does_not_wait_for_a_norm_that_comes_before_its_layers(events):
    def body(rank, group):
        model = NormBefore(events if rank == 0 else [])
        session = og.distribute(model, og.Dense(), group=group)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 512)).backward()
        session.detach()

    run_ranks(2, body)
    assert events[-3:] == [512 * 512, "norm", 512 * 512 + 4 * 512]
