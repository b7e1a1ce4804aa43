"""Tasks of kind "gossip": trainings without a centre, beside all-reduces and local steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

import outergrad as og
from outergrad.gossip import Choco, GossipMethod, PowerGossip
from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop, simulate
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.task import Context, Settings, at_least
from outergrad_lab.models.transformers import GPT
from outergrad_lab.training.job import decayed
from outergrad_lab.training.training import predict

Outer = dict[str, Any]
"""Settings of exchanges: every, rounds, lr, momentum, overlap."""


def _dense(outer: Outer) -> Any:
    return og.Dense()


def _local_steps(outer: Outer) -> Any:
    """Local steps whose outer optimizer has the rate and the momentum that gossip has."""
    rate, momentum = outer["lr"], outer["momentum"]
    by = partial(SGD, lr=rate, momentum=momentum, nesterov=momentum > 0)
    return og.LocalSteps(outer["every"], outer=by, overlap=outer["overlap"])


def _gossip(graph: str, method: GossipMethod | None = None) -> Callable[[Outer], Any]:
    return lambda outer: og.Gossip(graph, method, **outer)


WAYS: dict[str, Callable[[Outer], Any]] = {
    "all-reduce": _dense,
    "local steps": _local_steps,
    "ring": _gossip("ring"),
    "exponential": _gossip("exponential"),
    "complete": _gossip("complete"),
    "ring, power, rank 1": _gossip("ring", PowerGossip()),
    "ring, power, rank 4": _gossip("ring", PowerGossip(rank=4)),
    "ring, choco, signs": _gossip("ring", Choco(reduce=og.wire.Sign(), gamma=0.45)),
    "ring, choco, largest 1 %": _gossip("ring", Choco(reduce=og.wire.TopK(0.01), gamma=0.0375)),
}
"""Methods by name, made of the settings of exchanges. The steps of CHOCO are those of
arXiv 2008.01425."""


class Subject(NamedTuple):
    """A model that is trained, and the form of its inputs.

    Attributes:
        model: Makes the model for some data.
        flat: Whether inputs are one vector each.
    """

    model: Callable[[Dataset], nn.Module]
    flat: bool


def _mlp(data: Dataset) -> nn.Module:
    return nn.Sequential(
        nn.Linear(data.x_train.shape[1], 64), nn.ReLU(), nn.Linear(64, data.classes)
    )


SUBJECTS = {
    "mnist": Subject(_mlp, flat=True),
    "tinyshakespeare": Subject(lambda data: GPT(data.format, width=64, depth=2), flat=False),
}
"""By name of the data: an MLP of 64 hidden features, and a GPT of two layers."""
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "sgd": SGD,
    "adam": Adam,
}
"""A site's own optimizers."""
SPLITS = ("even", "sorted")
"""Rows at random, or by their labels, so that a site has few of them."""


@dataclass(frozen=True, kw_only=True)
class GossipWork:
    """Trains at several sites in one of `WAYS`, and tests the mean model and each site's own.

    Attributes:
        data: One of `SUBJECTS`.
        way: One of `WAYS`.
        split: One of `SPLITS`.
        optimizer: One of `OPTIMIZERS`.
        lr: Its rate.
        decay: Share of the rate at the end, reached by a cosine; 1 for a constant rate.
        every: Steps between two exchanges; an all-reduce is one of gradients, in each step.
        rounds: Rounds of an exchange of gossip.
        outer_lr: Rate of what a site's own steps have changed.
        momentum: Outer momentum; none if left out.
        overlap: Steps that are made while an exchange travels.
        sites: Number of sites.
        batch_size: Rows per site and step.
        steps: Steps of each site's optimizer.
        test_rows: Test rows.
        seed: Seed of weights, division of the rows, and batches.
    """

    data: str
    way: str
    split: str = "even"
    optimizer: str
    lr: float
    decay: float = 1.0
    every: int = at_least(1, 1)
    rounds: int = at_least(1, 1)
    outer_lr: float = 1.0
    momentum: float | None = None
    overlap: int = field(default=0, metadata={"least": 0})
    sites: int = at_least(2, 8)
    batch_size: int = at_least(1, 32)
    steps: int = at_least(1)
    test_rows: int = at_least(1, 10000)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses names that are not known, and settings that do not go together."""
        places = {"data": SUBJECTS, "way": WAYS, "split": SPLITS, "optimizer": OPTIMIZERS}
        for name, there in places.items():
            if getattr(self, name) not in there:
                told = ", ".join(there)
                raise RecipeError(f"{name} must be one of {told}, not {getattr(self, name)!r}")
        try:
            _ = self.method
        except ValueError as error:
            raise RecipeError(str(error)) from error

    @property
    def method(self) -> Any:
        """The method that `og.distribute` is given."""
        outer = {"lr": self.outer_lr, "momentum": self.momentum or 0.0, "overlap": self.overlap}
        return WAYS[self.way]({"every": self.every, "rounds": self.rounds, **outer})

    def run(self, context: Context) -> dict[str, Any]:
        """Trains, in one step of progress per step of training."""
        subject, data = SUBJECTS[self.data], load(self.data, context.data_dir)
        if subject.flat:
            data = data.mapped(lambda x: x.flatten(1))
        context.steps(self.steps)
        torch.manual_seed(self.seed)
        start, dealt = subject.model(data), self._dealt(data)

        def work(group: dist.ProcessGroup, stop: Stop) -> _Course:
            advance = context.advance if group.rank() == 0 else lambda: None
            own = dealt[group.rank()]
            return self._trained(copy.deepcopy(start), data, own, group, stop, advance)

        courses = simulate(work, self.sites)
        own = [course.own["accuracy"] for course in courses]
        sites = {"worst_accuracy": min(own), "best_accuracy": max(own)}
        sent = {"sent_bytes": max(course.sent_bytes for course in courses)}
        row = {**courses[0].mean, **sites, **sent}
        return {"rows": [row], "parameters": sum(p.numel() for p in start.parameters())}

    def _dealt(self, data: Dataset) -> list[Tensor]:
        """Returns the rows of each site."""
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(data.y_train), generator=generator)
        if self.split == "sorted":
            order = data.y_train.argsort(stable=True)
        return [*order.chunk(self.sites)]

    def _trained(
        self,
        model: nn.Module,
        data: Dataset,
        rows: Tensor,
        group: dist.ProcessGroup,
        stop: Stop,
        advance: Callable[[], None],
    ) -> _Course:
        session = og.distribute(model, self.method, group=group)
        optimizer = OPTIMIZERS[self.optimizer](model.parameters(), lr=self.lr)
        schedule = decayed(optimizer, self.steps, self.decay)
        before = session.stats().total_sent_bytes
        for x, y in stop.checked(self._batches(data, rows, group.rank())):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            advance()
        sent = (session.stats().total_sent_bytes - before) / self.steps
        own = tested(model, data, self.test_rows)
        session.flush()
        mean = tested(model, data, self.test_rows) if group.rank() == 0 else {}
        session.detach()
        return _Course(own, mean, sent)

    def _batches(self, data: Dataset, rows: Tensor, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(100 + self.seed * self.sites + rank)
        for _ in range(self.steps):
            batch = rows[torch.randint(len(rows), (self.batch_size,), generator=generator)]
            yield data.x_train[batch], data.y_train[batch]


_NAMES = {"every": "every", "rounds": "rounds", "outer_lr": "lr"}
_NAMES |= {"momentum": "momentum", "overlap": "overlap"}


def exchanges(settings: Settings) -> str:
    """Returns the way and those settings of exchanges that a task names: ``ring, every=4``."""
    named = [f"{name}={settings[key]}" for key, name in _NAMES.items() if key in settings]
    return ", ".join([settings["way"], *named])


class _Course(NamedTuple):
    own: dict[str, float]
    mean: dict[str, float]
    sent_bytes: float


def tested(model: nn.Module, data: Dataset, rows: int) -> dict[str, float]:
    """Returns accuracy and loss on the first test rows."""
    logits, y = predict(model, data.x_test[:rows]), data.y_test[:rows]
    right = (logits.argmax(1) == y).float().mean().item()
    return {"accuracy": right, "test_loss": cross_entropy(logits, y).item()}
