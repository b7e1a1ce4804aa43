"""Methods and small models that plans are compared on with real sessions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import outergrad as og
from outergrad_lab.models.transformers import GPT, Format

METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "dad forced": og.DAD(always=True),
    "dad, many messages": og.DAD(always=True, bucket_bytes=1),
    "dad, int8": og.DAD(wire=og.wire.Int8()),
    "edad": og.EDAD(),
    "edad, raw": og.EDAD(inputs="raw"),
    "rank-dad": og.RankDAD(rank=2),
    "rank-dad, gather, top k": og.RankDAD(
        rank=3, reduce="gather", wire=(og.wire.TopK(0.3), og.wire.Int8())
    ),
    "rank-dad, all_reduce": og.RankDAD(rank=2, reduce="all_reduce"),
    "rank-dad, alternate": og.RankDAD(rank=2, reduce="alternate"),
    "rank-dad, alternate, tolerance": og.RankDAD(rank=3, reduce="alternate", tolerance=0.3),
    "rank-dad, two_way": og.RankDAD(rank=2, reduce="two_way"),
    "rank-dad, two_way, top k": og.RankDAD(
        rank=3, reduce="two_way", wire=(og.wire.TopK(0.3), og.wire.Int8())
    ),
    "rank-dad, few bits": og.RankDAD(rank=4, wire=og.wire.Int4(), vectors=og.wire.Int4()),
    "rank-dad, two_way, few bits": og.RankDAD(
        rank=3, reduce="two_way", wire=og.wire.Int3(), vectors=og.wire.Int4()
    ),
    "rank-dad, budget": og.RankDAD(budget="64kB"),
    "rank-dad, budget, two ways": og.RankDAD(budget="64kB", reduce="two_way"),
    "powersgd": og.PowerSGD(rank=2),
    "sparse": og.Sparse(density=0.02),
    "sparse, blocks, int8": og.Sparse(density=0.1, select="blocks", wire=og.wire.Int8()),
    "sparse, random, warm-up": og.Sparse(density=0.01, select="random", warmup=100),
}


def mlp() -> tuple[nn.Module, Tensor]:
    widths = (40, 64, 64, 10)
    layers = [nn.Linear(i, o) for i, o in pairwise(widths)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.ReLU(), layers[2]), torch.randn(6, 40)


def gru() -> tuple[nn.Module, Tensor]:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.gru = nn.Linear(5, 12), nn.GRU(12, 16, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(self.embed(x))[0][:, -1])

    return Last(), torch.randn(2, 3, 5)


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 7)]
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


def gpt() -> tuple[nn.Module, Tensor]:
    format = Format(shape=(4,), classes=20, tokens=True)
    return GPT(format, width=32, depth=1, heads=2), torch.randint(20, (2, 4))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": mlp,
    "gru": gru,
    "convolutions": convolutions,
    "gpt": gpt,
}


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()
