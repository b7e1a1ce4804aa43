"""Tasks of kind "correction": images that differ from those of training, with and without help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop, simulate
from outergrad.nn import DistributionCorrection, collecting, share
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.task import Context, at_least

CHANNELS = {"mnist": (1, 28), "cifar10": (3, 32)}
"""Channels of an image and its side."""
_COLLECTED = 10
"""Batches per site of which the reference is read."""


@dataclass(frozen=True, kw_only=True)
class CorrectionWork:
    """Trains a small convolutional network and tests it on changed images, by each of `WAYS`.

    References are read by several sites, each from its own rows, and shared.

    Attributes:
        data: One of `CHANNELS`.
        steps: Steps of Adam.
        batch_size: Rows per step, per batch of the reference, and per batch of the test.
        quantiles: Quantiles per channel.
        sites: Sites that share a reference.
        test_rows: Test rows, the first ones.
        lr: Rate of Adam.
        seed: Seed of weights, batches and noise.
    """

    data: str
    steps: int = at_least(1)
    batch_size: int = at_least(2, 100)
    quantiles: int = at_least(2, 64)
    sites: int = at_least(1, 2)
    test_rows: int = at_least(1, 2000)
    lr: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses data that is no images."""
        if self.data not in CHANNELS:
            raise RecipeError(f"data must be one of {', '.join(CHANNELS)}, not {self.data!r}")

    def run(self, context: Context) -> dict[str, Any]:
        """Trains and tests; a step of progress per step of training, and one per change."""
        channels, side = CHANNELS[self.data]
        data = load(self.data, context.data_dir).mapped(
            lambda x: x.reshape(-1, channels, side, side)
        )
        context.steps(self.steps + len(CHANGES))
        torch.manual_seed(self.seed)
        model = network(channels, side, data.classes, self.quantiles)
        self._train(model, data, context)
        shared_bytes = self._read_reference(model, data)
        rows = []
        for change in CHANGES:
            rows += self._tested(model, data, change)
            context.advance()
        return {"rows": rows, "shared_bytes": shared_bytes}

    def _train(self, model: nn.Module, data: Dataset, context: Context) -> None:
        optimizer = Adam(model.parameters(), lr=self.lr)
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            rows = torch.randint(len(data.x_train), (self.batch_size,), generator=generator)
            optimizer.zero_grad()
            cross_entropy(model(data.x_train[rows]), data.y_train[rows]).backward()
            optimizer.step()
            context.advance()

    def _read_reference(self, model: nn.Module, data: Dataset) -> int:
        """Lets every site read a reference from its rows; returns the bytes that one has sent."""
        state = model.state_dict()

        def work(group: dist.ProcessGroup, _: Stop) -> int:
            own, rank = replicas[group.rank()], group.rank()
            batches = data.x_train[rank :: self.sites].split(self.batch_size)[:_COLLECTED]
            with torch.no_grad(), collecting(own):
                for x in batches:
                    own(x)
            return share(own, group=group)

        channels, side = CHANNELS[self.data]
        replicas = [
            network(channels, side, data.classes, self.quantiles) for _ in range(self.sites)
        ]
        for replica in replicas:
            replica.load_state_dict(state)
        sent = simulate(work, self.sites)[0]
        model.load_state_dict(replicas[0].state_dict())
        return sent

    def _tested(self, model: nn.Module, data: Dataset, change: str) -> list[dict[str, Any]]:
        x, y = data.x_test[: self.test_rows], data.y_test[: self.test_rows]
        generator = torch.Generator().manual_seed(self.seed)
        changed = CHANGES[change](x, generator)
        found = {way: self._accuracy(model, changed, y, way) for way in WAYS}
        return [{"case": change, "way": way, "accuracy": a} for way, a in found.items()]

    @torch.no_grad()
    def _accuracy(self, model: nn.Module, x: Tensor, y: Tensor, way: str) -> float:
        WAYS[way](model.eval())
        state = {name: t.clone() for name, t in model.state_dict().items()}
        logits = torch.cat([model(part) for part in x.split(self.batch_size)])
        model.load_state_dict(state)  # norms that use their batch also write to their means
        return (logits.argmax(1) == y).float().mean().item()


def network(channels: int, side: int, classes: int, quantiles: int) -> nn.Sequential:
    """Returns two convolutions, each with a correction and a norm, and a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, 16), (16, 32)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            DistributionCorrection(outputs, quantiles=quantiles),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, classes))


def _plain(model: nn.Module) -> None:
    _set(model, amount=0.0, of_batch=False)


def _of_batch(model: nn.Module) -> None:
    _set(model, amount=0.0, of_batch=True)


def _quantiles(model: nn.Module) -> None:
    _set(model, amount=1.0, of_batch=False)


def _set(model: nn.Module, *, amount: float, of_batch: bool) -> None:
    for module in model.modules():
        if isinstance(module, DistributionCorrection):
            module.amount = amount
        if isinstance(module, nn.BatchNorm2d):
            module.train(of_batch)


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "as trained": _plain,
    "norms of the batch": _of_batch,
    "quantiles": _quantiles,
}
"""Sets a model up for a test: as it was trained; with batch norms that use the mean and variance of
the test batch; with `DistributionCorrection` in use."""


def _scanner(x: Tensor, _: torch.Generator) -> Tensor:
    """Returns images as if by another scanner: the square root of grey values, then blurred.

    Grey values are scaled to 0 to 1 for the root, and back. Each pixel becomes the mean of itself
    and its neighbours.
    """
    low, high = x.amin(), x.amax()
    curved = ((x - low) / (high - low)).sqrt() * (high - low) + low
    return nn.functional.avg_pool2d(curved, 3, stride=1, padding=1, count_include_pad=False)


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + x.std() * torch.randn(x.shape, generator=generator)


CHANGES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "none": lambda x, _: x,
    "contrast": lambda x, _: x.mean() + 0.15 * (x - x.mean()),
    "brightness": lambda x, _: x + 2 * x.std(),
    "noise": _noise,
    "scanner": _scanner,
}
"""Changes of images, in units of their own range: nobody has tuned them to a way."""
