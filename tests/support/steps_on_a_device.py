"""Steps of every method at two sites, of which the first has its model on another device.

A program of its own, as a device can be registered once per process. It prints JSON: by method,
how far the sites are apart in the end, by how much per step the host waited and where, and the
error, if there was one. It is called with names of `METHODS`, or of `SPOILED`: steps by "dad" with
something wrong on their way.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import other_device
import outergrad as og
from outergrad.buckets.gather import FactorBucket
from outergrad.methods.dad import DADCompressor
from ranks import run_ranks

STEPS = 4
_PATIENCE = timedelta(seconds=5)
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "dad, raw rows": og.DAD(always=True, reveal="activations"),
    "dad, int8": og.DAD(always=True, wire=og.wire.Int8()),
    "edad": og.EDAD(always=True),
    "edad, blocks": og.EDAD(blocks=["first", "attention"], always=True),
    "rank-dad": og.RankDAD(rank=2),
    "rank-dad, small core": og.RankDAD(rank=2, solver="small_core"),
    "rank-dad, to a tolerance": og.RankDAD(rank=4, tolerance=0.3),
    "rank-dad, all_reduce to a tolerance": og.RankDAD(rank=4, reduce="all_reduce", tolerance=0.3),
    "rank-dad, all_reduce of bf16": og.RankDAD(rank=2, reduce="all_reduce", wire=og.wire.BF16()),
    "rank-dad, two_way": og.RankDAD(rank=2, reduce="two_way"),
    "rank-dad, all_reduce": og.RankDAD(rank=2, reduce="all_reduce"),
    "rank-dad, alternate": og.RankDAD(rank=2, reduce="alternate"),
    "rank-dad, bf16": og.RankDAD(rank=2, wire=og.wire.BF16()),
    "rank-dad, int8": og.RankDAD(rank=2, wire=og.wire.Int8()),
    "rank-dad, int4": og.RankDAD(rank=2, wire=og.wire.Int4()),
    "powersgd": og.PowerSGD(rank=2),
    "sparse": og.Sparse(density=0.1, always=True),
    "sparse, at random": og.Sparse(density=0.1, select="random", always=True),
    "sparse, blocks": og.Sparse(density=0.1, select="blocks", block=8, always=True),
    "local steps": og.LocalSteps(2),
    "local steps of low rank": og.LocalSteps(2, method=og.RankDAD(rank=2)),
    "auto": og.Auto(),
}


class Net(nn.Module):
    """A layer of each kind that has a rule, running statistics, and a weight without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.conv, self.norm = nn.Conv1d(12, 8, 3, groups=2), nn.BatchNorm1d(8)
        self.rnn = nn.RNN(8, 6)
        self.first, self.last = nn.Linear(6, 30), nn.Linear(30, 24)
        self.own = nn.Parameter(torch.randn(24, 5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.attention(x, x, x, need_weights=False)[0]
        x, _ = self.rnn(self.norm(self.conv(x.mT)).relu().permute(2, 0, 1))
        return self.last(self.first(x).tanh()) @ self.own


def train(method: Any, rank: int, group: Any, device: torch.device) -> tuple[Any, Any, list[str]]:
    """The parameters of a site in the end, what its host waited for, how layers travelled."""
    torch.manual_seed(1)
    net, generator = Net(), torch.Generator().manual_seed(rank)
    ids = torch.randint(20, (3, 6 + rank), generator=generator)
    if rank == 0:
        net, ids = net.to(device), ids.to(device)
    session = og.distribute(net, method, group=group, max_bad_steps=None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with other_device.watching() if rank == 0 else nullcontext({}) as waits:
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(ids).square().mean().backward()
            optimizer.step()
    travels = sorted({layer.travels for layer in session.stats().layers.values()})
    session.detach()
    return {name: p.detach().cpu() for name, p in net.named_parameters()}, dict(waits), travels


def found(method: Any, device: torch.device) -> dict[str, Any]:
    """What came of a method."""
    try:
        (ours, waits, travels), (theirs, *_) = run_ranks(
            2, lambda rank, group: train(method, rank, group, device), _PATIENCE
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    apart = max(float((ours[n] - p).norm() / p.norm()) for n, p in theirs.items())
    told = [[place, what, count / STEPS] for (place, what), count in sorted(waits.items())]
    return {"apart": apart, "travels": travels, "waits": told}


def _spoiled(owner: type, name: str, wrong: Callable[..., Any]) -> Any:
    """A method of a class, which before does something wrong with what it is given."""
    right = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(RuntimeError):
            wrong(*args)
        return right(self, *args, **kwargs)

    return patch.object(owner, name, method)


def _with_rows(wrong: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """Where factors are made, with the deltas of the first layer of a message."""
    return lambda: _spoiled(DADCompressor, "compress", lambda parts: wrong(parts[0].gradient.d_GRO))


SPOILED: dict[str, Callable[[], Any]] = {
    "a number": _with_rows(lambda d: d.sum().item()),
    "a copy": _with_rows(lambda d: d.cpu()),
    "for numpy": _with_rows(lambda d: d.cpu().numpy()),
    "a list": _with_rows(lambda d: d[0, 0].tolist()),
    "a mask": _with_rows(lambda d: d[d > 0]),
    "an if": _with_rows(lambda d: 1 if d.sum() > 0 else 0),
    "another device": _with_rows(lambda d: d + torch.ones(d.shape)),
    "where messages are made": lambda: _spoiled(
        FactorBucket, "pack", lambda context, *_: next(iter(context.params.values())).sum().item()
    ),
}
"""What must be seen."""


def main() -> None:
    """Prints what was found; the threads of the device do not outlive an interpreter in order."""
    device = other_device.register()
    results = {}
    for name in sys.argv[1:]:
        with SPOILED.get(name, nullcontext)():
            results[name] = found(METHODS.get(name, METHODS["dad"]), device)
    print(json.dumps(results), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
