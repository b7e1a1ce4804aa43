"""Error of the compressed gradient on real training, against the best of its rank.

Two sites train on real data with exact gradients; at every step each method compresses the
gradients that they have. Its error is that of the mean gradient that comes out, relative to the
error of the best approximation of the rank: 1.1 is ten percent more. With error feedback, what is
compressed is the gradient and what was not sent before. Medians over steps; the worst layer.

    python benchmarks/errors.py --workloads mlp,gpt,gru
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.core.coding import received, sum_dtype
from outergrad.linalg.outer import stack, weight_gradient
from outergrad_lab.data import Dataset, load
from outergrad_lab.training.job import ADAM_EPS
from outergrad_lab.workloads import WORKLOADS, Workload

SITES = 2


def methods(rank: int) -> dict[str, tuple[Any, int]]:
    """Methods, and how many triplets they may send; in each line the same bytes per site."""
    none: Any = {"error_feedback": None}
    double: Any = {"rank": 2 * rank, "wire": og.wire.BF16()}
    reduced = og.RankDAD(rank=rank, reduce="all_reduce", error_feedback="dense")
    return {
        "PowerSGD": (og.PowerSGD(rank=rank, min_ratio=1), rank),
        "all_reduce, bf16": (replace(reduced, **double), 2 * rank),
        "gather": (og.RankDAD(rank=rank, reduce="gather", error_feedback="dense"), rank),
        "PowerSGD -": (og.PowerSGD(rank=rank, min_ratio=1, error_feedback=False), rank),
        "all_reduce, bf16 -": (replace(reduced, **double, **none), 2 * rank),
        "gather -": (og.RankDAD(rank=rank, reduce="gather", **none), rank),
    }


class Compared:
    """A method at all sites of one process.

    Args:
        method: with its own memory per site.
        sent: R.
        rank: what it is compared with.
    """

    def __init__(self, method: Any, sent: int, rank: int) -> None:
        self._compressors = [method.compressor() for _ in range(SITES)]
        self._gathers = isinstance(method, og.RankDAD) and method.reduce == "gather"
        self._sent, self._rank = sent, rank
        self._codecs = method.wire
        self.ratios: dict[str, list[float]] = {}

    def step(self, gradients: dict[str, list[Tensor]], *, measure: bool) -> None:
        """Compresses the gradients of all sites, by name."""
        for name, gradient_S in gradients.items():
            slot = og.Slot("", name, *gradient_S[0].shape[1:])
            pairs = list(zip(self._compressors, gradient_S, strict=True))
            whole = torch.stack([self._with_memory(e, slot, g) for e, g in pairs]).mean(dim=0)
            found = self._gathered(slot, pairs) if self._gathers else self._reduced(slot, pairs)
            for compressor in self._compressors:
                compressor.commit(applied=True)
            if measure and 2 * self._rank < min(whole.shape[1:]):
                best = torch.linalg.svdvals(whole[0].double())[self._rank :].norm()
                ratio = (whole[0].double() - found.double()).norm() / best
                self.ratios.setdefault(name, []).append(ratio.item())

    def _gathered(self, slot: og.Slot, pairs: list[tuple[Any, Tensor]]) -> Tensor:
        rows = min(self._sent, slot.outputs, slot.inputs)
        parts = [e.compress([og.Part(slot, g, rows)])[0] for e, g in pairs]
        arrived = [og.Factors(*(received(self._codecs, t) for t in part[:2])) for part in parts]
        return weight_gradient(stack(arrived), 1 / SITES)

    def _reduced(self, slot: og.Slot, pairs: list[tuple[Any, Tensor]]) -> Tensor:
        y = self._sum([e.sketches.begin(slot, g) for e, g in pairs])
        z = self._sum([e.sketches.turn(slot, y) for e, _ in pairs])
        found = [compressor.sketches.end(slot, z, SITES) for compressor, _ in pairs]
        return weight_gradient(found[0])

    def _sum(self, parts: list[Tensor]) -> Tensor:
        """As an all-reduce does: rounded before and after each addition."""
        first, *others = (part.to(sum_dtype(self._codecs, part.dtype)) for part in parts)
        return sum(others, first)

    def _with_memory(self, compressor: Any, slot: og.Slot, gradient: Tensor) -> Tensor:
        memory = compressor._memories[slot]
        return gradient if memory is None or memory.residual is None else gradient + memory.residual

    def typical(self) -> tuple[float, float]:
        """The median layer and the worst."""
        medians = sorted(statistics.median(ratios) for ratios in self.ratios.values())
        return statistics.median(medians), medians[-1]


def batches(data: Dataset, workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of random rows, of one site after the other."""
    generator = torch.Generator().manual_seed(0)
    while True:
        rows = torch.randint(len(data.x_train), (workload.batch_size,), generator=generator)
        yield data.x_train[rows], data.y_train[rows]


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of weights, (1, O, I)."""
    return {
        name: p.grad.detach().clone().reshape(1, p.shape[0], -1)
        for name, p in model.named_parameters()
        if p.dim() >= 2 and p.grad is not None
    }


def run(name: str, options: argparse.Namespace) -> None:
    """Trains a workload and prints a line per method and rank."""
    workload = WORKLOADS[name]
    assert workload.data is not None
    torch.manual_seed(0)
    model, data = workload.build(), load(workload.data, options.data_dir)
    optimizer = torch.optim.Adam(model.parameters(), lr=workload.lr, eps=ADAM_EPS)
    compared = {
        (label, rank): Compared(*pair, rank)
        for rank in options.ranks
        for label, pair in methods(rank).items()
    }
    source = batches(data, workload)
    for step in range(options.steps):
        gradients: dict[str, list[Tensor]] = {}
        total: dict[str, Tensor] = {}
        for _ in range(SITES):
            model.zero_grad()
            x, y = next(source)
            cross_entropy(model(x), y).backward()
            for layer, gradient in matrices(model).items():
                gradients.setdefault(layer, []).append(gradient)
            for layer, p in model.named_parameters():
                if p.grad is not None:
                    total[layer] = total.get(layer, torch.zeros_like(p)) + p.grad / SITES
        measure = step >= options.warm and step % options.every == 0
        for method in compared.values():
            method.step(gradients, measure=measure)
        for layer, p in model.named_parameters():
            p.grad = total.get(layer)
        optimizer.step()
    show(name, compared, options.ranks)


def show(name: str, compared: dict[tuple[str, int], Compared], ranks: list[int]) -> None:
    """A table: ranks across."""
    print(f"\n| {name} | " + " | ".join(f"R = {rank}" for rank in ranks) + " |")
    print("|---|" + "---|" * len(ranks))
    for label in dict.fromkeys(label for label, _ in compared):
        cells = []
        for rank in ranks:
            median, worst = compared[label, rank].typical()
            cells.append(f"{median:.2f} ({worst:.2f})")
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=lambda s: s.split(","), default=["mlp", "gpt", "gru"])
    parser.add_argument(
        "--ranks", type=lambda s: list(map(int, s.split(","))), default=[4, 8, 16, 32]
    )
    parser.add_argument("--steps", type=int, default=61)
    parser.add_argument("--warm", type=int, default=30, help="steps before the first that counts")
    parser.add_argument("--every", type=int, default=5, help="of which steps one is measured")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"))
    return parser.parse_args()


def main() -> None:
    """A table per workload: the median layer (the worst one); "-": without error feedback."""
    options = parse()
    torch.set_num_threads(options.threads)
    for name in options.workloads:
        run(name, options)


if __name__ == "__main__":
    main()
