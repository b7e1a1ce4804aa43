"""Trainings with differential privacy: by outergrad among sites, by Opacus on pooled data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import outergrad as og
from outergrad.core.packages import require
from outergrad.launch.errors import RecipeError
from outergrad.tools.named_methods.attach import Distributed
from outergrad_lab.data import Dataset
from outergrad_lab.peers.named import attach_of
from outergrad_lab.training.job import Job
from outergrad_lab.training.sites import Group, rank_in
from outergrad_lab.training.split import PoissonBatches, Rows, generator_of
from outergrad_lab.training.training import Training, start


def require_private(job: Job) -> None:
    """Raises `RecipeError` unless a job's method can be trained with privacy."""
    if job.method != "pooled" and not isinstance(attach_of(job.method), Distributed):
        raise RecipeError(
            f"epsilon: {job.method} has no privacy; use pooled, which Opacus trains, or a method "
            f"of og.distribute, as dense"
        )


@dataclass(frozen=True)
class Privacy:
    """Privacy of a training.

    Attributes:
        release: What a step releases, with the least noise for the training's ε.
        steps: Steps of the training.
        delta: δ.
        clip: Largest norm of a row's gradient.
    """

    release: og.private.Release
    steps: int
    delta: float
    clip: float

    @classmethod
    def of(
        cls, job: Job, rows: int, steps: int, *, epsilon: float, delta: float, clip: float
    ) -> Privacy:
        """Finds the noise with which a training stays within ε.

        Args:
            job: The training; its sites draw `batch_size` rows each, as Poisson batches.
            rows: Training rows of all sites together.
            steps: Steps of the training.
            epsilon: ε against whoever gets the model, of one row more or less.
            delta: δ.
            clip: Largest norm of a row's gradient.
        """
        sampling = og.private.Poisson(job.batch_size * job.sites / rows)
        noise = og.private.noise_for(epsilon, delta, sampling, steps)
        release = og.private.Release(noise, sampling, sites=job.sites, sums="masked")
        return cls(release, steps, delta, clip)

    def told(self) -> dict[str, Any]:
        """Returns σ, and ε against a site that sees masked sums and knows its own noise."""
        ledger = og.private.Ledger(self.delta)
        ledger.record(self.release, self.steps)
        seen = ledger.epsilon("site") if self.release.sites > 1 else None
        return {"noise": self.release.noise, "site_epsilon": seen}

    def start(self, job: Job, data: Dataset, rows_by_site: Rows, group: Group) -> Training:
        """Makes the model and the batches of a job; all sites must call it.

        With "pooled", all rows are at one place, where Opacus clips, adds noise and steps. Its
        batches are the unions of those that the sites would draw.

        Raises:
            ImportError: Opacus is not installed.
            RecipeError: The method cannot be used with privacy.
        """
        private = og.Private(
            clip=self.clip,
            noise=self.release.noise,
            batch=job.batch_size * job.sites,
            generator=generator_of(job.seed, rank_in(group)),
        )
        options = {"transform": private}
        training = start(job, data, rows_by_site, group=group, options=options, steps=self.steps)
        given = {one.name: getattr(training.batches, one.name) for one in fields(training.batches)}
        batches = PoissonBatches(**given, rate=self.release.sampling.rate)
        training = replace(training, batches=batches)
        return _by_opacus(training, private) if job.method == "pooled" else training


def _by_opacus(training: Training, private: og.Private) -> Training:
    require("opacus")
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(training.replica.model)
    optimizer = DPOptimizer(
        training.optimizer,
        noise_multiplier=private.noise,
        max_grad_norm=private.clip,
        expected_batch_size=round(private.batch),
        generator=private.generator,
    )
    return replace(training, replica=replace(training.replica, model=model), optimizer=optimizer)
