"""The training loop that every recipe shares."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer

from outergrad.recipes.data import Dataset
from outergrad.recipes.job import Job
from outergrad.recipes.models import MODELS
from outergrad.recipes.replica import METHODS, Replica
from outergrad.recipes.sites import mean_over_sites, smallest_over_sites
from outergrad.recipes.split import SPLITS, Batches, Rows, full_batches

ADAM_EPS = 1e-6
"""Above the rounding noise of a gradient: Adam makes whole steps of what is larger than eps."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A job as one site does it.

    Attributes:
        data: What to learn and to be tested on.
        batches: The batches of this site.
        replica: The model.
        optimizer: Its optimizer.
    """

    data: Dataset
    batches: Batches
    replica: Replica
    optimizer: Optimizer

    def epoch(self, number: int) -> Iterator[float]:
        """Trains for an epoch; yields this site's loss after each step."""
        self.replica.model.train()
        for x, y in self.batches.epoch(number):
            self.optimizer.zero_grad()
            loss = cross_entropy(self.replica.model(x), y)
            loss.backward()
            self.optimizer.step()
            yield loss.item()

    def accuracy(self) -> float:
        """Share of the test images that are classified right, averaged over sites."""
        share = accuracy(self.replica.model, self.data)
        return mean_over_sites(torch.tensor(share)).item()


def start(job: Job, data: Dataset, rows_by_site: Rows) -> Training:
    """Makes the model and the batches of a job; all sites must call it.

    Args:
        job: The job.
        data: The data of all sites.
        rows_by_site: The rows of ``data`` that each site holds.
    """
    torch.manual_seed(job.seed)
    model = MODELS[job.model]((data.features, *job.widths, data.classes))
    replica = METHODS[job.method](model, job.reveal)
    return Training(
        data=data,
        batches=site_batches(job, data, rows_by_site),
        replica=replica,
        optimizer=Adam(model.parameters(), lr=job.lr, eps=ADAM_EPS),
    )


def deal(job: Job, data: Dataset) -> Rows:
    """Gives each site its rows of the training data.

    Raises:
        RecipeError: A site would have too few.
    """
    rows_by_site = SPLITS[job.split](data.y_train, job.sites, job.seed)
    full_batches(rows_by_site, job.batch_size)
    return rows_by_site


def site_batches(job: Job, data: Dataset, rows_by_site: Rows) -> Batches:
    """The batches of this site, as many as every site has; all sites' if pooled."""
    pooled = job.method == "pooled"
    return Batches(
        x=data.x_train,
        y=data.y_train,
        rows_by_site=rows_by_site,
        sites=range(job.sites) if pooled else (dist.get_rank(),),
        batch_size=job.batch_size,
        steps=smallest_over_sites(full_batches(rows_by_site, job.batch_size)),
        seed=job.seed,
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset) -> float:
    """Share of the test images that a model classifies right."""
    model.eval()
    guesses = model(data.x_test).argmax(dim=1)
    return (guesses == data.y_test).float().mean().item()
