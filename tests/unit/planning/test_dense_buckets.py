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


class Some(nn.Module):
    """Parameters of so many KiB each, of which the last has its gradient first."""

    def __init__(self, sizes):
        super().__init__()
        self.ps = nn.ParameterList(nn.Parameter(torch.zeros(size * KIB)) for size in sizes)

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
    ],
    ids=str,
)
def test_the_first_bucket_is_small_and_takes_few_that_are_left(monkeypatch, sizes, sums):
    sent, reduce = [], TorchComm.all_reduce

    def all_reduce(comm, t):
        if comm.rank == 0:
            sent.append(len(t) - TOLD)
        return reduce(comm, t)

    monkeypatch.setattr(TorchComm, "all_reduce", all_reduce)

    def body(rank, group):
        model = Some(sizes)
        session = og.distribute(model, og.Dense(), group=group)
        model().backward()
        session.detach()
        return all(p.grad.eq(1).all() for p in model.parameters())

    assert all(run_ranks(2, body))
    assert sent[-len(sums) :] == [size * KIB for size in sums]
