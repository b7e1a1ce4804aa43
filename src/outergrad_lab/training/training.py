"""The training loop of all jobs."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from outergrad.record.jsonl import JSONL
from outergrad.tools.named_methods.attach import Distributed, Replica
from outergrad_lab.data import Dataset
from outergrad_lab.models import build_model
from outergrad_lab.peers.named import attach_of
from outergrad_lab.training.job import Job, decayed, optimizer_of
from outergrad_lab.training.recording import Recording
from outergrad_lab.training.sites import Group, mean_over_sites, number_in, smallest_over_sites
from outergrad_lab.training.split import SPLITS, Batches, Rows, batch_sizes, full_batches

TEST_ROWS = 100
"""Number of rows that are tested at once."""

_SEEDING = threading.Lock()
"""Lock for seeding: sites may be threads, which share one random stream."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A job at one site.

    Attributes:
        data: Data to learn from and to be tested on.
        batches: The batches of this site.
        replica: The model.
        optimizer: Its optimizer.
        schedule: Schedule of its learning rate; None for a constant one.
        recording: Recording of the training.
        tested: Numbers of this site's rows among the test rows.
        group: The sites.
    """

    data: Dataset
    batches: Batches
    replica: Replica
    optimizer: Optimizer
    recording: Recording
    schedule: LRScheduler | None = None
    tested: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    group: Group = None

    def epoch(self, number: int, start: int = 0) -> Iterator[float]:
        """Trains for an epoch; yields this site's weighted loss after each step.

        Args:
            number: Number of the epoch.
            start: Number of its steps that are done already.
        """
        self.replica.model.train()
        for x, y in self.batches.epoch(number, start):
            self.optimizer.zero_grad()
            own = cross_entropy(self.replica.model(x), y)
            loss = self.batches.weight * own
            (own if self.replica.weighted else loss).backward()
            self.optimizer.step()
            if self.schedule:
                self.schedule.step()
            value = loss.item()
            self.recording.step(value)
            yield value

    def accuracy(self) -> float:
        """Returns the share of test labels predicted right, averaged over sites.

        Records the evaluation on the test rows of this site, if a row has one label.
        """
        logits = predict(self.replica.model, self.data.x_test)
        share = share_right(logits, self.data.y_test)
        self.recording.log(accuracy=share)
        if self.data.y_test.dim() == 1 and len(self.tested):
            p = logits[self.tested].double().softmax(dim=1)
            self.recording.log_eval(self.data.y_test[self.tested], p)
        return mean_over_sites(torch.tensor(share), self.group).item()

    def close(self) -> None:
        """Ends the exchange, which leaves a plain model, and the recording."""
        self.replica.close()
        self.recording.close()


def start(
    job: Job,
    data: Dataset,
    rows_by_site: Rows,
    recorder: JSONL | None = None,
    group: Group = None,
    present: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> Training:
    """Makes the model and the batches of a job; all sites must call it.

    Args:
        job: The job.
        data: The data of all sites.
        rows_by_site: The rows of ``data`` that each site holds.
        recorder: Recorder of the training.
        group: The sites.
        present: Their numbers, where some of the job's sites are left out.
        options: Further arguments of `og.distribute`, where it is outergrad that exchanges.
        steps: Steps over which the learning rate decays; those of the job's epochs if None.
    """
    with _SEEDING:
        torch.manual_seed(job.seed)
        model = build_model(job.model, data.format, job.widths, job.activation)
    attach = attach_of(job.method, local=job.local, joint=job.joint)
    if isinstance(attach, Distributed):
        both = {**attach.options, **(options or {})}
        attach = replace(attach, recorder=recorder, options=both)
    replica = attach(model, group)
    batches = site_batches(job, data, rows_by_site, group, present)
    optimizer = optimizer_of(job.optimizer, model, job.lr)
    steps = steps or job.epochs * batches.steps
    return Training(
        data=data,
        batches=batches,
        replica=replica,
        optimizer=optimizer,
        schedule=None if job.decay == 1 else decayed(optimizer, steps, job.decay),
        recording=Recording(recorder, job.method, replica, group),
        tested=test_rows(job, data)[number_in(group, present)],
        group=group,
    )


def deal(job: Job, data: Dataset) -> Rows:
    """Gives each site its rows of the training data.

    Raises:
        RecipeError: A site would have too few, or the data cannot be split so.
    """
    rows_by_site = SPLITS[job.split](data, job.sites, job.seed)
    full_batches(rows_by_site, batch_sizes(job.split, rows_by_site, job.batch_size))
    return rows_by_site


def test_rows(job: Job, data: Dataset) -> Rows:
    """Gives each site its test rows, in sizes and mixes of classes as its training rows.

    Who spoke a test row is not known: where each site has its own speakers, and where rows have
    several labels, test rows are shuffled.
    """
    tested = replace(data, x_train=data.x_test, y_train=data.y_test, groups_train=None)
    split = "even" if job.split == "speaker" or data.y_test.dim() > 1 else job.split
    return SPLITS[split](tested, job.sites, job.seed)


def site_batches(
    job: Job,
    data: Dataset,
    rows_by_site: Rows,
    group: Group = None,
    present: Sequence[int] | None = None,
) -> Batches:
    """Returns the batches of this site, as many as every site has; all sites' if pooled."""
    pooled = job.method == "pooled"
    sizes = batch_sizes(job.split, rows_by_site, job.batch_size)
    return Batches(
        x=data.x_train,
        y=data.y_train,
        rows_by_site=rows_by_site,
        sites=range(job.sites) if pooled else (number_in(group, present),),
        batch_sizes=sizes,
        steps=smallest_over_sites(full_batches(rows_by_site, sizes), group),
        seed=job.seed,
        present=present,
    )


def accuracy(model: nn.Module, data: Dataset) -> float:
    """Returns the share of test labels predicted right, one per row or per position."""
    return share_right(predict(model, data.x_test), data.y_test)


def share_right(logits: Tensor, y: Tensor) -> float:
    """Returns the share of labels that have the highest logit."""
    right = logits.argmax(dim=1) == y
    return right.sum().item() / right.numel()


def test_loss(model: nn.Module, data: Dataset, rows: int) -> float:
    """Returns the mean cross-entropy of the first ``rows`` test rows, on this site's model."""
    return cross_entropy(predict(model, data.x_test[:rows]), data.y_test[:rows]).item()


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Returns logits of rows, in batches: all at once may need too much memory."""
    with evaluating(model) as plain:
        return torch.cat([plain(part) for part in x.split(TEST_ROWS)])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Yields a model in evaluation mode without gradients, and restores its mode."""
    was_training = model.training
    # DDP's own forward would wait for the other sites, to send them rank 0's buffers.
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    plain.eval()
    try:
        with torch.no_grad():
            yield plain
    finally:
        plain.train(was_training)
