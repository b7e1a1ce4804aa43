"""A site that gossips in a process of its own: `python gossiping_site.py RANK SITES FOLDER`.

It writes what its weights were after some steps into the folder. The last site kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import outergrad as og
from outergrad.launch.traffic import stay_on_loopback

DIES_AFTER, NOTED, STEPS = 3, 10, 60


def main(rank: int, sites: int, folder: Path) -> None:
    """Gossips on a ring, with a rate of 0: the neighbours alone change this site's weights."""
    stay_on_loopback()
    store, limit = (folder / "store").as_uri(), timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=sites, timeout=limit)
    model = nn.Linear(6, 5).double()
    session = og.distribute(model, og.Gossip("ring"), timeout=30.0)
    optimizer = SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(rank)))
    noted = []
    for number in range(STEPS):
        if rank == sites - 1 and number == DIES_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if number in (NOTED, STEPS - 1):
            noted.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    torch.save((noted, session.stats().took_part), folder / f"site-{rank}.pt")
    session.release()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
