"""One method's model, stepped and timed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from outergrad.tools.plan.subject import subject
from outergrad_lab.bench.plan import Plan
from outergrad_lab.data import Dataset, load, missing_files, synthetic
from outergrad_lab.peers.named import attach_of
from outergrad_lab.training.job import optimizer_of
from outergrad_lab.training.split import Batches, even_split, full_batches
from outergrad_lab.workloads import Workload

PATIENCE = timedelta(hours=2)
"""Timeout above the slowest step of the slowest link; a site that dies ends the others at once."""

HEAD_START_S = 0.03
"""Seconds to read in the file when to start: sites look at it every 10 ms."""


class Meeting:
    """Barriers and agreements through a file that all sites can see.

    Every site must call the same methods in the same order.
    """

    def __init__(self, path: Path, site: int, sites: int) -> None:
        """Opens the file at one of the sites."""
        self.site, self.sites = site, sites
        self._store = dist.FileStore(str(path), sites)  # pyright: ignore[reportPrivateImportUsage]
        self._store.set_timeout(PATIENCE)
        self._count = 0

    def barrier(self) -> None:
        """Waits until every site is here."""
        key = self._next()
        if self._store.add(key, 1) == self.sites:
            self._store.set(f"{key}/all", "")
        self._store.get(f"{key}/all")

    def start(self) -> None:
        """Waits until every site is here, and lets all go at the same moment.

        After a barrier alone the first site would go up to 10 ms before the last, while a step of a
        small model may take no longer.
        """
        self.barrier()
        moment_s = self.told(time.monotonic() + HEAD_START_S)  # all processes share this clock
        time.sleep(max(0.0, moment_s - time.monotonic()))

    def told(self, answer: float | None = None) -> float:
        """Returns site 0's answer at every site."""
        key = self._next()
        if self.site == 0:
            assert answer is not None
            self._store.set(key, repr(float(answer)))
        return float(self._store.get(key))

    def _next(self) -> str:
        self._count += 1
        return str(self._count)


@dataclass(frozen=True)
class Phases:
    """Seconds of the phases of one step.

    Attributes:
        forward_s: Seconds of the forward pass and the loss.
        backward_s: Seconds of the backward pass, including the exchange, compress and wait.
        optimizer_s: Seconds of the optimizer.
        compress_s: Seconds that outergrad's session spent on turning rows into factors.
        wait_s: Seconds that the training thread waited for other sites in outergrad's session.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    compress_s: float = float("nan")
    wait_s: float = float("nan")

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @staticmethod
    def names() -> list[str]:
        """Returns the names of the phases."""
        return [field.name for field in fields(Phases)]


Batch = tuple[Tensor, Tensor]
"""Inputs and labels."""
Loss = Callable[[nn.Module], Tensor]
"""Runs the forward pass of a batch."""


def dataset(plan: Plan) -> tuple[Dataset | None, str]:
    """Loads the workload's real data where its files are, else random data of the same shape.

    Returns:
        The data and its name; no data for a model of the user's own, which brings its inputs.
    """
    recipe = plan.recipe
    if recipe is None:
        return None, "its own"
    if recipe.data and (plan.until_loss or not missing_files(recipe.data, plan.data_dir)):
        return load(recipe.data, plan.data_dir), recipe.data
    return synthetic(recipe.format, rows=2 * plan.sites * _rows(plan, recipe), seed=0), "synthetic"


def _rows(plan: Plan, recipe: Workload) -> int:
    return plan.rows or recipe.batch_size


def batches(plan: Plan, recipe: Workload, data: Dataset, site: int) -> Iterator[Batch]:
    """Returns this site's batches without end."""
    rows_by_site = even_split(data, plan.sites, 0)
    sizes = [_rows(plan, recipe)] * plan.sites
    return Batches(
        x=data.x_train,
        y=data.y_train,
        rows_by_site=rows_by_site,
        sites=(site,),
        batch_sizes=sizes,
        steps=full_batches(rows_by_site, sizes),
        seed=0,
    ).forever()


def _built(plan: Plan, data: Dataset | None, site: int) -> tuple[nn.Module, Iterator[Loss]]:
    """Model and losses of a training, the same for every method.

    A model of the user's own is copied, for the factory may return the same one again.
    """
    if plan.recipe is None or data is None:
        own = subject(plan.workload, plan.rows)
        return copy.deepcopy(own.model), repeat(own.loss)
    torch.manual_seed(0)
    found = batches(plan, plan.recipe, data, site)
    return plan.recipe.build(), (partial(_cross_entropy, batch) for batch in found)


def _cross_entropy(batch: Batch, model: nn.Module) -> Tensor:
    x, y = batch
    return cross_entropy(model(x), y)


class Trainer:
    """Trains by one method: weights and batches as for all, a process group of its own."""

    def __init__(self, plan: Plan, method: str, data: Dataset | None, site: int) -> None:
        """Builds the model; every site must, for the same method."""
        model, self.losses = _built(plan, data, site)
        self.group = None if method == "alone" else _new_group()
        self.replica = attach_of(method)(model, self.group)
        self.optimizer = _optimizer(plan, model)

    def step(self) -> Phases:
        """Takes one step on the next batch."""
        loss_of = next(self.losses)
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = loss_of(self.replica.model)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        ended = time.perf_counter()
        return Phases(forward - began, backward - forward, ended - backward, *self._inside())

    def _inside(self) -> tuple[float, ...]:
        if not self.replica.session:
            return ()
        stats = self.replica.session.stats()
        return stats.compress_s, stats.wait_s

    def claimed_bytes(self) -> int | None:
        """Returns the bytes sent by outergrad's session, or a peer; None if there is neither."""
        if self.replica.peer:
            return self.replica.peer.sent_bytes
        return self.replica.session.stats().total_sent_bytes if self.replica.session else None

    def close(self) -> None:
        """Closes the replica and destroys the group; every site must call it."""
        self.replica.close()
        if self.group:
            dist.destroy_process_group(self.group)


def _new_group() -> dist.ProcessGroup:
    group = dist.new_group(timeout=PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _optimizer(plan: Plan, model: nn.Module) -> Optimizer:
    """Returns the plan's optimizer; else SGD, which is cheap, where the exchange is timed."""
    lr = plan.recipe.lr if plan.until_loss and plan.recipe else 1e-3
    return optimizer_of(plan.optimizer or ("adam" if plan.until_loss else "sgd"), model, lr)
