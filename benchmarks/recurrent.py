"""Low rank of a recurrent layer from its factors, and from the gradient that autograd forms.

    python benchmarks/recurrent.py

Two sites of one thread on this machine, `og.RankDAD(rank=4)`; milliseconds per training step. From
factors the gates are computed a second time; `_RECOMPUTED` in methods/low_rank/prices.py says what
that costs. Its break-even is the largest share of the gradient's products that may be saved so that
formed gradients are still chosen: they are, where it is above 1 / `_RECOMPUTED`.
"""

from __future__ import annotations

import tempfile
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import outergrad as og
from outergrad.methods.low_rank.prices import _THIN, Sizes

METHOD = og.RankDAD(rank=4)
SITES, WARMUP, STEPS, CLASSES = 2, 20, 40, 10
SHAPES = [(hidden, steps) for hidden in (128, 256, 512) for steps in (10, 40)]
BATCH = 32


class Last(nn.Module):
    """A layer, and classes from its last state."""

    def __init__(self, layer: type[nn.RNNBase], hidden: int) -> None:
        super().__init__()
        self.recurrent: Any = layer(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores, (B, classes)."""
        return self.head(self.recurrent(x)[0][:, -1])


def step_ms(layer: type[nn.RNNBase], hidden: int, steps: int, *, from_factors: bool) -> float:
    """The median of a step."""
    model, found = Last(layer, hidden), []
    with patch.object(Sizes, "cheaper_from_factors", lambda *_: from_factors):
        session = og.distribute(model, METHOD)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        x, y = torch.randn(BATCH, steps, hidden), torch.randint(0, CLASSES, (BATCH,))
        for _ in range(WARMUP + STEPS):
            began = perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            found.append(1e3 * (perf_counter() - began))
        session.detach()
    return median(found[WARMUP:])


def break_even(outputs: int, inputs: int, rows: int) -> float:
    """See above."""
    thin = 2 * _THIN * (METHOD.rank + METHOD.memory_rank)
    return thin * (outputs + inputs) / (outputs * inputs) - thin / rows


def main(site: int, folder: str) -> None:
    """A line per layer and shape."""
    torch.set_num_threads(1)
    where = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=where, rank=site, world_size=SITES)
    for layer, gates in ((nn.LSTM, 4), (nn.GRU, 3)):
        for hidden, steps in SHAPES:
            ms = [step_ms(layer, hidden, steps, from_factors=way) for way in (True, False)]
            limit = break_even(gates * hidden, hidden, BATCH * steps)
            if site == 0:
                shape = f"{layer.__name__} {hidden}, {BATCH * steps} rows"
                told = f"from factors {ms[0]:.1f} ms, formed {ms[1]:.1f}, break-even {limit:.2f}"
                print(f"{shape}: {told}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(main, (place,), nprocs=SITES)
