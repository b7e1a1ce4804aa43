"""Tasks of kind "pushing": push-sum over directed graphs, on split classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import outergrad as og
from outergrad.gossip import Exponential, Lossy, Ring, SparsePush
from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop, simulate
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.task import Context, at_least

GRAPHS = {"ring": Ring(directed=True), "exponential": Exponential(directed=True)}


@dataclass(frozen=True, kw_only=True)
class PushingWork:
    """Trains a network of one hidden layer at sites that have other classes than each other.

    Images are sorted by their labels, and each site gets as many. The step size of plain SGD falls
    to zero by a line. The model that counts is the mean over all sites.

    Attributes:
        data: Images.
        way: One of `WAYS`.
        fraction, gamma: Of `og.gossip.SparsePush` with the largest entries.
        lost: Share of the edges that is lost in each step.
        hidden: Width of the hidden layer.
        sites: Number of sites.
        batch_size: Rows per site and step.
        steps: Steps of SGD.
        lr: Rate of the first step.
        seed: Seed of weights, batches and lost edges.
    """

    data: str
    way: str
    fraction: float = 0.01
    gamma: float = 0.03
    lost: float = 0.1
    hidden: int = at_least(1, 64)
    sites: int = at_least(2, 8)
    batch_size: int = at_least(1, 32)
    steps: int = at_least(1)
    lr: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses ways that are not known, and settings that the method refuses."""
        if self.way not in WAYS:
            raise RecipeError(f"way must be one of {', '.join(WAYS)}, not {self.way!r}")
        try:
            WAYS[self.way](self)
        except ValueError as error:
            raise RecipeError(str(error)) from error

    def run(self, context: Context) -> dict[str, Any]:
        """Trains, in one step of progress per step of training."""
        data = load(self.data, context.data_dir).mapped(lambda x: x.flatten(1))
        context.steps(self.steps)
        rows = data.y_train.argsort(stable=True).chunk(self.sites)
        torch.manual_seed(self.seed)
        start = nn.Sequential(
            nn.Linear(data.x_train.shape[1], self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, data.classes),
        )

        def work(group: dist.ProcessGroup, stop: Stop) -> Trained:
            own, rank = rows[group.rank()], group.rank()
            advance = context.advance if rank == 0 else lambda: None
            batches = self._batches(data.x_train[own], data.y_train[own], rank)
            return self._trained(copy.deepcopy(start), batches, group, stop, advance)

        found = simulate(work, self.sites)
        sent_bytes = sum(one.sent_bytes for one in found) / self.sites
        return {"rows": [{"sent_bytes": sent_bytes, **tested(found[0].model, data)}]}

    def _trained(
        self,
        model: nn.Module,
        batches: Callable[[], tuple[Tensor, Tensor]],
        group: dist.ProcessGroup,
        stop: Stop,
        advance: Callable[[], None],
    ) -> Trained:
        """Trains this site's replica; returns the mean of all, and the bytes per step."""
        session = og.distribute(model, WAYS[self.way](self), group=group)
        optimizer = SGD(model.parameters(), lr=self.lr)
        before = session.stats().total_sent_bytes
        for step in stop.checked(range(self.steps)):
            x, y = batches()
            optimizer.param_groups[0]["lr"] = self.lr * (1 - step / self.steps)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            advance()
        sent = (session.stats().total_sent_bytes - before) / self.steps
        session.flush()
        session.detach()
        return Trained(model, sent)

    def _batches(self, x: Tensor, y: Tensor, rank: int) -> Callable[[], tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed * self.sites + rank)

        def batch() -> tuple[Tensor, Tensor]:
            rows = torch.randint(len(x), (self.batch_size,), generator=generator)
            return x[rows], y[rows]

        return batch


class Trained(NamedTuple):
    """A trained replica.

    Attributes:
        model: The mean over all sites.
        sent_bytes: Bytes that this site has sent per step.
    """

    model: nn.Module
    sent_bytes: float


def _pushed(graph: str, *, sparse: bool) -> Callable[[PushingWork], Any]:
    def way(work: PushingWork) -> Any:
        lossy = Lossy(GRAPHS[graph], share=work.lost, seed=work.seed)
        if not sparse:
            return og.Gossip(lossy)
        reduce = og.wire.TopK(work.fraction)
        return og.Gossip(lossy, SparsePush(reduce=reduce, gamma=work.gamma, seed=work.seed))

    return way


WAYS: dict[str, Callable[[PushingWork], Any]] = {
    "all-reduce": lambda _: og.Dense(),
    "push-sum, ring": _pushed("ring", sparse=False),
    "Sparse-Push, ring": _pushed("ring", sparse=True),
    "push-sum, exponential": _pushed("exponential", sparse=False),
    "Sparse-Push, exponential": _pushed("exponential", sparse=True),
}
"""From an exchange of all sites to a few bytes along single edges."""


@torch.no_grad()
def tested(model: nn.Module, data: Dataset) -> dict[str, float]:
    """Returns accuracy and loss on the test rows."""
    logits = model(data.x_test)
    right = (logits.argmax(1) == data.y_test).float().mean().item()
    return {"accuracy": right, "test_loss": cross_entropy(logits, data.y_test).item()}
