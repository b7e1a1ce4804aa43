"""Tasks of kind "forward": forward gradients with local losses against backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, unfold
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

import outergrad as og
from outergrad.forward import LocalMixer, SeededGradients, forward_loss
from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop, simulate
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.task import Context, at_least

PATCH = {"mnist": None, "cifar10": 8}
"""Height and width of a patch; None for the whole image as one."""
_TESTED_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class ForwardWork:
    """Trains a `LocalMixer` at several sites in one of `WAYS`.

    Attributes:
        data: One of `PATCH`.
        way: One of `WAYS`.
        draws: Directions per site and step of the way "scalars".
        channels, groups, blocks: Of the network.
        sites: Number of sites.
        batch_size: Rows per site and step.
        steps: Steps of Adam, whose rate falls to zero by a cosine.
        lr: Rate of the first step.
        seed: Seed of weights, batches and directions.
    """

    data: str
    way: str
    draws: int = at_least(1, 16)
    channels: int = at_least(2, 64)
    groups: int = at_least(1, 8)
    blocks: int = at_least(1, 2)
    sites: int = at_least(1, 2)
    batch_size: int = at_least(1, 64)
    steps: int = at_least(1)
    lr: float = 0.003
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses names that are not known, and channels that make no groups."""
        for name, value, known in (("data", self.data, PATCH), ("way", self.way, WAYS)):
            if value not in known:
                raise RecipeError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if self.channels % self.groups or self.channels < 2 * self.groups:
            raise RecipeError(f"channels={self.channels} must be 2 or more of each group")

    def run(self, context: Context) -> dict[str, Any]:
        """Trains, in one step of progress per step of training."""
        data = in_patches(load(self.data, context.data_dir), PATCH[self.data])
        context.steps(self.steps)

        def work(group: dist.ProcessGroup, stop: Stop) -> float:
            with torch.random.fork_rng(devices=()):
                advance = context.advance if group.rank() == 0 else lambda: None
                return self._trained(models[group.rank()], data, group, stop, advance)

        models = [self._model(data) for _ in range(self.sites)]
        sent_bytes = simulate(work, self.sites)[0]
        for first, other in zip(models[0].parameters(), models[-1].parameters(), strict=True):
            if not first.equal(other):
                raise RuntimeError("replicas have parted")
        row = {"sent_bytes": sent_bytes, **tested(models[0], data)}
        return {"rows": [row], "parameters": sum(p.numel() for p in models[0].parameters())}

    def _model(self, data: Dataset) -> LocalMixer:
        torch.manual_seed(self.seed)
        patches, features = data.x_train.shape[1:]
        sizes = {"channels": self.channels, "groups": self.groups, "blocks": self.blocks}
        return LocalMixer(features, data.classes, patches=patches, **sizes)

    def _trained(
        self,
        model: LocalMixer,
        data: Dataset,
        group: dist.ProcessGroup,
        stop: Stop,
        advance: Callable[[], None],
    ) -> float:
        """Trains this site's replica; returns the bytes that it has sent per step."""
        optimizer = Adam(model.parameters(), lr=self.lr)
        schedule = CosineAnnealingLR(optimizer, self.steps)
        learn = WAYS[self.way](self, model, group)
        for k, (x, y) in enumerate(stop.checked(self._batches(data, group.rank()))):
            optimizer.zero_grad()
            learn.step(x, y, self.steps * (self.seed * self.sites + group.rank()) + k)
            optimizer.step()
            schedule.step()
            advance()
        return learn.end()

    def _batches(self, data: Dataset, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed * self.sites + rank)
        for _ in range(self.steps):
            rows = torch.randint(len(data.x_train), (self.batch_size,), generator=generator)
            yield data.x_train[rows], data.y_train[rows]


class Learning(NamedTuple):
    """A way to leave gradients in a model.

    Attributes:
        step: Takes a batch and a seed.
        end: Ends it, and returns the bytes that this site has sent per step.
    """

    step: Callable[[Tensor, Tensor, int], object]
    end: Callable[[], float]


def _by_backward(loss: Callable[[LocalMixer, Tensor, Tensor, int], Tensor]) -> Callable[..., Any]:
    def way(work: ForwardWork, model: LocalMixer, group: dist.ProcessGroup) -> Learning:
        session = og.distribute(model, og.Dense(), group=group)

        def step(x: Tensor, y: Tensor, seed: int) -> None:
            loss(model, x, y, seed).backward()

        def end() -> float:
            sent = session.stats().sent_bytes
            session.detach()
            return sent

        return Learning(step, end)

    return way


def _by_scalars(work: ForwardWork, model: LocalMixer, group: dist.ProcessGroup) -> Learning:
    def losses(model: LocalMixer, x: Tensor, y: Tensor) -> Tensor:
        return model.local_losses(x, y).mean(1).sum(1)

    seeded = SeededGradients(
        model, losses, draws=work.draws, seed=work.seed, owners=model.owners(), group=group
    )

    def step(x: Tensor, y: Tensor, _: int) -> None:
        seeded.step(x, y)

    return Learning(step, lambda: seeded.sent_bytes / seeded.taken)


def _whole(model: LocalMixer, x: Tensor, y: Tensor, _: int) -> Tensor:
    """One loss, at the end, through all blocks."""
    h = model.as_patches(x)
    for block in model.each_block():
        h = block(h)
    return cross_entropy(model.each_block()[-1].logits(h).sum((1, 2)), y)


def _local(model: LocalMixer, x: Tensor, y: Tensor, _: int) -> Tensor:
    """The blocks' own losses."""
    return model.local_losses(x, y).mean(1).sum()


WAYS: dict[str, Callable[[ForwardWork, LocalMixer, dist.ProcessGroup], Learning]] = {
    "backward": _by_backward(_whole),
    "local losses, backward": _by_backward(_local),
    "perturbed activities": _by_backward(forward_loss),
    "scalars": _by_scalars,
}
"""From one loss and backward, by dense gradients, to scalars alone."""


def in_patches(data: Dataset, side: int | None) -> Dataset:
    """Returns images as (rows, patches, numbers); None for all of an image as one patch."""
    if side is None:
        return data.mapped(lambda x: x.flatten(1)[:, None])
    return data.mapped(lambda x: unfold(x, side, stride=side).mT.contiguous())


@torch.no_grad()
def tested(model: LocalMixer, data: Dataset) -> dict[str, float]:
    """Returns accuracy and loss on the test rows."""
    logits = torch.cat([model(x) for x in data.x_test.split(_TESTED_ROWS)])
    right = (logits.argmax(1) == data.y_test).float().mean().item()
    return {"accuracy": right, "test_loss": cross_entropy(logits, data.y_test).item()}
