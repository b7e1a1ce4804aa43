"""Tasks of kind "training": a model over sites that are threads of this process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, count, islice
from pathlib import Path
from statistics import fmean
from time import thread_time
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop, simulate
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.hospitals import (
    Hospital,
    Scores,
    Seen,
    dealt,
    effective_ranks,
    judged,
    scores,
    seen_at,
)
from outergrad_lab.experiments.private import Privacy, require_private
from outergrad_lab.experiments.task import Context, Settings, at_least, read
from outergrad_lab.peers.named import sites_differ
from outergrad_lab.training.job import Job, require
from outergrad_lab.training.sites import Group, mean_over_sites
from outergrad_lab.training.split import Rows
from outergrad_lab.training.training import Training, start

_PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class TrainingWork(Job):
    """A training, and how often it is tested.

    Attributes:
        steps: Number of steps; None for the epochs of the job.
        tests: Number of tests, evenly spread, the last one at the end.
        test_rows: Number of test rows; None for all.
        ranks: Whether tests include the effective ranks of the gradients.
        per_site: Whether every site is tested; if their models differ, they always are.
        precision: Precision of weights and numbers: float32 or float64.
        workload: Name of the training, where an experiment has several.
        validation: Percentage of training rows that a site keeps for validation; it is then tested
            on test rows of its own.
        epsilon: ε of a training with differential privacy; None without.
        delta: Its δ.
        clip: Its largest norm of a row's gradient.
    """

    steps: int | None = at_least(1, None)
    tests: int = at_least(1, 6)
    test_rows: int | None = at_least(1, None)
    ranks: bool = False
    per_site: bool = False
    precision: str = "float32"
    workload: str | None = None
    validation: int | None = at_least(1, None)
    epsilon: float | None = None
    delta: float = 1e-5
    clip: float = 1.0

    @classmethod
    def of(cls, settings: Settings) -> "TrainingWork":
        """Reads settings.

        Raises:
            RecipeError: A setting is not allowed.
        """
        work = read(cls, settings)
        if ("steps" in settings) == ("epochs" in settings):
            raise RecipeError("give either steps or epochs")
        return work

    def __post_init__(self) -> None:
        """Checks every value, those of the job too."""
        super().__post_init__()
        if self.precision not in _PRECISIONS:
            raise RecipeError(f"precision must be one of {', '.join(_PRECISIONS)}")
        if self.epsilon is not None:
            require_private(self)
            require(self.steps is not None, "steps", "given, with epsilon", self)

    @property
    def differ(self) -> bool:
        """True if sites have models of their own, or are tested separately."""
        own_models = sites_differ(self.method) or bool(self.local)
        return own_models or self.per_site or self.validation is not None

    def marks(self, steps: int) -> set[int]:
        """Returns the numbers of steps after which it is tested."""
        tests = min(self.tests, steps)
        return {round(steps * k / tests) for k in range(1, tests + 1)}

    def run(self, context: Context) -> dict[str, Any]:
        """Trains at every site; one step of progress for each of the training."""
        with _in_precision(_PRECISIONS[self.precision]) as dtype:
            data = _loaded(self.data, context.data_dir).to(dtype)
            rows_by_site, hospitals = dealt(self, data, self.validation)
            privacy = self._privacy(sum(map(len, rows_by_site)))
            begin = partial(_start, self, privacy, data, rows_by_site)
            site = partial(_site, self, begin, hospitals, context)
            found = _summary(simulate(site, 1 if self.method == "pooled" else self.sites))
            return found | (privacy.told() if privacy else {})

    def _privacy(self, rows: int) -> Privacy | None:
        if self.epsilon is None:
            return None
        assert self.steps is not None
        terms = {"epsilon": self.epsilon, "delta": self.delta, "clip": self.clip}
        return Privacy.of(self, rows, self.steps, **terms)


@dataclass(frozen=True, kw_only=True)
class Look:
    """One test at one site.

    Attributes:
        step: Number of steps done.
        sent_bytes: Bytes sent so far; None if they are not counted.
        ranks: Effective ranks by layer, if requested.
        scores: Scores; None where the site was not tested.
        seen: Outputs for the rows of the site's hospitals, where sites keep rows for validation.
    """

    step: int
    sent_bytes: int | None
    ranks: dict[str, float]
    scores: Scores | None
    seen: list[Seen]


@dataclass
class Course:
    """One site's record of a training.

    Attributes:
        parameters: Number of the model's parameters.
        losses: Loss of every step, on the site's own rows.
        looks: One per test.
        compute_s: Processor seconds of its thread in all steps, without tests and without waiting.
    """

    parameters: int
    losses: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    compute_s: float = 0.0


@contextmanager
def _in_precision(dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Makes weights in a precision inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield dtype
    finally:
        torch.set_default_dtype(before)


@lru_cache(maxsize=1)
def _loaded(name: str, data_dir: Path) -> Dataset:
    return load(name, data_dir)


def _start(
    work: TrainingWork,
    privacy: Privacy | None,
    data: Dataset,
    rows_by_site: Rows,
    group: ProcessGroup,
) -> Training:
    if privacy is None:
        return start(work, data, rows_by_site, group=group, steps=work.steps)
    return privacy.start(work, data, rows_by_site, group)


def _site(
    work: TrainingWork,
    begin: Callable[[ProcessGroup], Training],
    hospitals: Sequence[Hospital],
    context: Context,
    group: ProcessGroup,
    stop: Stop,
) -> Course:
    first = group.rank() == 0
    own = hospitals[group.rank() :: group.size()]  # all, if one model learns from all
    with closing(begin(group)) as training:
        steps = work.steps or work.epochs * training.batches.steps
        course = Course(sum(p.numel() for p in training.replica.model.parameters()))
        marks = work.marks(steps)
        if first:
            context.steps(steps)
        losses = chain.from_iterable(map(training.epoch, count()))
        began = thread_time()
        for loss in stop.checked(islice(losses, steps)):
            course.losses.append(loss)
            course.compute_s += thread_time() - began
            if (done := len(course.losses)) in marks:
                tested = first or work.differ
                course.looks.append(_look(work, training, own, done, steps, tested=tested))
            if first:
                context.advance()
            began = thread_time()
        return course


def _look(
    work: TrainingWork,
    training: Training,
    own: Sequence[Hospital],
    step: int,
    steps: int,
    *,
    tested: bool,
) -> Look:
    model = training.replica.model
    ranks = effective_ranks(model) if work.ranks and tested else {}
    if step == steps:
        training.replica.finish()
    sent_bytes = training.replica.total_sent_bytes(step)
    if work.method not in ("pooled", "alone"):
        _share_statistics(model, training.group)
    seen = [seen_at(hospital, model, training.data) for hospital in own]
    found = scores(model, training.data, work.test_rows) if tested and not seen else None
    return Look(step=step, sent_bytes=sent_bytes, ranks=ranks, scores=found, seen=seen)


@torch.no_grad()
def _share_statistics(model: nn.Module, group: Group) -> None:
    """Makes running statistics of norms their mean over the sites, as a consortium would."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(mean_over_sites(buffer, group))


def _summary(courses: Sequence[Course]) -> dict[str, Any]:
    looks = courses[0].looks
    layers = {
        name: [{"step": look.step, "effective_rank": look.ranks[name]} for look in looks]
        for name in looks[0].ranks
    }
    return {
        "losses": [fmean(losses) for losses in zip(*(c.losses for c in courses), strict=True)],
        "tests": [_test(sites) for sites in zip(*(c.looks for c in courses), strict=True)],
        "layers": layers or None,
        "parameters": courses[0].parameters,
        "compute_s": fmean(course.compute_s / len(course.losses) for course in courses),
    }


def _test(looks: Sequence[Look]) -> dict[str, Any]:
    about = {
        "step": looks[0].step,
        "sent_bytes": _mean_known(look.sent_bytes for look in looks),
    }
    if seen := [one for look in looks for one in look.seen]:
        return about | judged(seen)
    found = [look.scores for look in looks if look.scores]
    return about | {
        "loss": fmean(score.loss for score in found),
        "accuracy": fmean(score.accuracy for score in found),
        "auc": _mean_known(score.auc for score in found),
        "sites": [score._asdict() for score in found] if len(found) > 1 else None,
    }


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
