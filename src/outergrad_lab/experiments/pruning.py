"""Tasks of kind "pruning": channels with small scales are taken out of a convolutional network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softshrink
from torch.optim import Adam, Optimizer

from outergrad.launch.errors import RecipeError
from outergrad.optim import CoGD
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.task import Context, at_least

SHAPES = {"mnist": (1, 28), "cifar10": (3, 32)}
"""Channels of an image and its side."""
_WIDTHS = (16, 32, 32)
_ADMM_STEPS, _ADMM_PENALTY = 10, 0.01
"""Steps between two turns of ADMM's sparse copy of the scales, and how much it pulls."""


@dataclass(frozen=True, kw_only=True)
class PruningWork:
    """Trains with a penalty on the scales of channels, takes the smallest out, and tunes the rest.

    A scale is the weight of a batch norm, and its partner the kernels of the channel before it.

    Attributes:
        data: One of `SHAPES`.
        way: One of `WAYS`.
        coupling: Of `og.optim.CoGD`; the ways without it do not use it.
        l1: Penalty on the scales.
        removed: Shares of the channels of each layer that are taken out, per hundred.
        steps: Steps of training.
        tuned_steps: Steps of Adam after channels were taken out, the same for all ways.
        batch_size: Rows per step.
        test_rows: Test rows, the first ones.
        lr: Learning rate of both.
        seed: Seed of weights and batches.
    """

    data: str
    way: str
    coupling: float = 1.0
    l1: float = 0.01
    removed: int = at_least(1, 50)
    steps: int = at_least(1)
    tuned_steps: int = at_least(1, 100)
    batch_size: int = at_least(2, 64)
    test_rows: int = at_least(1, 2000)
    lr: float = 0.003
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses data that is no images, and ways that are not known."""
        for name, value, known in (("data", self.data, SHAPES), ("way", self.way, WAYS)):
            if value not in known:
                raise RecipeError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if self.removed >= 100:
            raise RecipeError(f"removed={self.removed} must leave channels: less than 100")

    def run(self, context: Context) -> dict[str, Any]:
        """Trains, prunes and tunes, in one step of progress per step of either."""
        channels, side = SHAPES[self.data]
        data = load(self.data, context.data_dir).mapped(
            lambda x: x.reshape(-1, channels, side, side)
        )
        context.steps(self.steps + self.tuned_steps)
        torch.manual_seed(self.seed)
        model = network(channels, side, data.classes)
        batches, stages = self._batches(data), dict[str, float]()
        training = WAYS[self.way](self, model)
        self._trained(model, training, batches, self.steps, context)
        training.end()
        stages["trained"] = self._accuracy(model, data)
        kept = [largest(norm.weight, 1 - self.removed / 100) for _, norm in pairs(model)]
        take_out(model, kept)
        stages["taken out"] = self._accuracy(model, data)
        tuning = _tuning(Adam(model.parameters(), lr=self.lr), model, kept)
        self._trained(model, tuning, batches, self.tuned_steps, context)
        stages["tuned"] = self._accuracy(model, data)
        rows = [{"case": stage, "accuracy": found} for stage, found in stages.items()]
        return {"rows": rows, "channels": sum(_WIDTHS), "kept": sum(map(int, map(torch.sum, kept)))}

    def _batches(self, data: Dataset) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            rows = torch.randint(len(data.x_train), (self.batch_size,), generator=generator)
            yield data.x_train[rows], data.y_train[rows]

    def _trained(
        self,
        model: nn.Module,
        training: Training,
        batches: Iterator[tuple[Tensor, Tensor]],
        steps: int,
        context: Context,
    ) -> None:
        model.train()
        for k in range(steps):
            x, y = next(batches)
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            training.step(k)
            context.advance()

    @torch.no_grad()
    def _accuracy(self, model: nn.Module, data: Dataset) -> float:
        model.eval()
        x, y = data.x_test[: self.test_rows], data.y_test[: self.test_rows]
        logits = torch.cat([model(part) for part in x.split(500)])
        return (logits.argmax(1) == y).float().mean().item()


class Training(NamedTuple):
    """A way to take steps.

    Attributes:
        step: Takes the number of a step, for which gradients are there.
        end: Ends it.
    """

    step: Callable[[int], object]
    end: Callable[[], object] = lambda: None


def network(channels: int, side: int, classes: int) -> nn.Sequential:
    """Returns three strided convolutions, each with a batch norm, and a linear layer.

    Scales begin at a half, as in the paper on pruning by scales (arXiv 1708.06519).
    """
    layers: list[nn.Module] = []
    for inputs, outputs in zip((channels, *_WIDTHS), _WIDTHS, strict=False):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
        nn.init.constant_(layers[-2].weight, 0.5)  # pyright: ignore[reportArgumentType]
        side = (side + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(_WIDTHS[-1] * side**2, classes))


def pairs(model: nn.Sequential) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Returns each convolution with the norm that scales its channels."""
    found = [m for m in model if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    return list(zip(found[::2], found[1::2], strict=True))  # pyright: ignore[reportReturnType]


def largest(scales_C: Tensor, share: float) -> Tensor:
    """Returns which channels have the largest scales, (C,), a share of them and one at least."""
    kept_C = torch.zeros(len(scales_C), dtype=torch.bool)
    kept_C[scales_C.abs().topk(max(1, round(share * len(scales_C)))).indices] = True
    return kept_C


@torch.no_grad()
def take_out(model: nn.Sequential, kept: list[Tensor]) -> None:
    """Lets the channels that are not kept put out zeros."""
    for (_, norm), kept_C in zip(pairs(model), kept, strict=True):
        norm.weight.mul_(kept_C)
        norm.bias.mul_(kept_C)


def _tuning(optimizer: Optimizer, model: nn.Sequential, kept: list[Tensor]) -> Training:
    def step(_: int) -> None:
        optimizer.step()
        take_out(model, kept)

    return Training(step)


def _proximal(work: PruningWork, model: nn.Sequential, coupling: float, l1: float) -> CoGD:
    found = [[norm.weight, conv.weight] for conv, norm in pairs(model)]
    paired = {id(p) for pair in found for p in pair}
    others = [p for p in model.parameters() if id(p) not in paired]
    groups = [{"params": pair, "pair": (0, 0)} for pair in found]
    return CoGD([*groups, {"params": others}], lr=work.lr, l1=l1, coupling=coupling)


def _coupled(work: PruningWork, model: nn.Sequential) -> Training:
    optimizer = _proximal(work, model, work.coupling, work.l1)
    return Training(lambda _: optimizer.step())


def _joint(work: PruningWork, model: nn.Sequential) -> Training:
    optimizer = _proximal(work, model, 0.0, work.l1)
    return Training(lambda _: optimizer.step())


def _alternating(work: PruningWork, model: nn.Sequential) -> Training:
    """Scales have every second step, all other parameters the steps between."""
    optimizer = _proximal(work, model, 0.0, work.l1)
    scales = {id(norm.weight) for _, norm in pairs(model)}

    def step(k: int) -> None:
        for p in model.parameters():
            if (id(p) in scales) != bool(k % 2):
                p.grad = None
        optimizer.step()

    return Training(step)


def _admm(work: PruningWork, model: nn.Sequential) -> Training:
    """Scales are pulled to a sparse copy, which follows them every few steps, and become it."""
    optimizer = _proximal(work, model, 0.0, 0.0)
    scales = [norm.weight for _, norm in pairs(model)]
    copies, owed = [p.detach().clone() for p in scales], [torch.zeros_like(p) for p in scales]

    @torch.no_grad()
    def step(k: int) -> None:
        for p, copy, due in zip(scales, copies, owed, strict=True):
            assert p.grad is not None
            p.grad += _ADMM_PENALTY * (p - copy + due)
        optimizer.step()
        if k % _ADMM_STEPS == _ADMM_STEPS - 1:
            for p, copy, due in zip(scales, copies, owed, strict=True):
                copy.copy_(softshrink(p + due, work.l1 / _ADMM_PENALTY))
                due.add_(p - copy)

    @torch.no_grad()
    def end() -> None:
        for p, copy in zip(scales, copies, strict=True):
            p.copy_(copy)

    return Training(step, end)


WAYS: dict[str, Callable[[PruningWork, nn.Sequential], Training]] = {
    "CoGD": _coupled,
    "joint Adam": _joint,
    "alternating Adam": _alternating,
    "ADMM": _admm,
}
"""All compute one gradient per step, of the same loss."""
