"""A site of two whose processors may round differently: prints what it is told of that.

python drifting_site.py RANK STORE

Two lines for each `on_drift`: what was told, and the sum of all parameters in the end.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

import outergrad as og
from outergrad.launch.traffic import stay_on_loopback

STEPS, EVERY = 12, 4


def train(rank: int, on_drift: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    options = {"verify_every": EVERY, "on_drift": on_drift}
    session = og.distribute(model, og.DAD(always=True), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            optimizer.zero_grad()
            try:
                model(torch.randn(16, 32, generator=generator)).square().mean().backward()
            except og.DriftError as error:
                told.append(str(error))
                session.make_equal()
            optimizer.step()
    told += [str(warning.message) for warning in caught]
    session.make_equal()
    total = float(sum(p.detach().double().sum() for p in model.parameters()))
    print(told, f"{total:.17g}", sep="\n")
    session.detach()


stay_on_loopback()
dist.init_process_group("gloo", init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)
for on_drift in ("raise", "mend"):
    train(int(sys.argv[1]), on_drift)
dist.destroy_process_group()
