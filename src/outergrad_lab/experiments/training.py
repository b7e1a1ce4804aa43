"""Tasks that train a model over sites that are threads of this process."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop, simulate
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.scores import Scores, effective_ranks, scores
from outergrad_lab.experiments.task import Context, Kind, Settings
from outergrad_lab.training.job import Job
from outergrad_lab.training.sites import Group, mean_over_sites
from outergrad_lab.training.training import Training, deal, start

_PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
_NUMBERS = ("batch_size", "lr", "seed", "sites")
_JOB = tuple(f.name for f in fields(Job) if f.name != "epochs")
_OWN = ("steps", "epochs", "tests", "test_rows", "ranks", "per_site", "precision")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training and how often it is looked at.

    Attributes:
        job: What is trained.
        steps: How many; None for the epochs of the job.
        tests: How often it is tested, evenly spread, the last time at the end.
        test_rows: On how many rows; None for all.
        ranks: Whether the effective ranks of the gradients are looked at then, too.
        per_site: Whether every site is tested: where they differ, they always are.
        precision: Of weights and numbers: float32 or float64.
    """

    job: Job
    steps: int | None
    tests: int = 6
    test_rows: int | None = None
    ranks: bool = False
    per_site: bool = False
    precision: str = "float32"

    @staticmethod
    def of(settings: Settings) -> "Plan":
        """Reads settings.

        Raises:
            RecipeError: One is not allowed.
        """
        for name in settings:
            if name not in (*_JOB, *_OWN):
                raise RecipeError(f"no setting {name!r}: there are {', '.join((*_JOB, *_OWN))}")
        if ("steps" in settings) == ("epochs" in settings):
            raise RecipeError("give either steps or epochs")
        own = {name: settings[name] for name in _OWN if name in settings and name != "epochs"}
        job = {name: settings[name] for name in _JOB if name in settings}
        job |= {n: tuple(job[n]) for n in ("widths", "local") if job.get(n) is not None}
        for name, value in (job | own).items():
            _require_type(name, value)
        plan = Plan(job=Job(**job, epochs=settings.get("epochs", 1)), **{"steps": None, **own})
        plan._check()
        return plan

    def _check(self) -> None:
        if self.precision not in _PRECISIONS:
            raise RecipeError(f"precision must be one of {', '.join(_PRECISIONS)}")
        for name in ("steps", "tests", "test_rows"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value > 0):
                raise RecipeError(f"{name} must be a whole number above 0, not {value!r}")

    def marks(self, steps: int) -> set[int]:
        """After how many steps it is looked at."""
        tests = min(self.tests, steps)
        return {round(steps * k / tests) for k in range(1, tests + 1)}


@dataclass
class Course:
    """What one site saw.

    Attributes:
        losses: Of every step, of its own rows.
        tests: Step and scores.
        sent_bytes: So far, at each test; None where nobody counts.
        ranks: Step and effective ranks by layer.
        parameters: How many the model has.
    """

    losses: list[float] = field(default_factory=list)
    tests: list[tuple[int, Scores]] = field(default_factory=list)
    sent_bytes: list[int | None] = field(default_factory=list)
    ranks: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    parameters: int = 0


def _require_type(name: str, value: Any) -> None:
    """Raises `RecipeError` for a text where a number belongs, as YAML reads 1e-3."""
    if name in _NUMBERS and not isinstance(value, int | float):
        raise RecipeError(f"{name} must be a number, as 0.001, not {value!r}")


def _run(settings: Settings, context: Context) -> dict[str, Any]:
    """Trains at every site; see `Plan` for the settings."""
    plan = Plan.of(settings)
    with _in_precision(_PRECISIONS[plan.precision]) as dtype:
        data = _loaded(plan.job.data, context.data_dir).to(dtype)
        site = partial(_site, plan, data, deal(plan.job, data), context)
        courses = simulate(site, 1 if plan.job.method == "pooled" else plan.job.sites)
    return _summary(courses)


TRAINING = Kind(check=Plan.of, run=_run)


@contextmanager
def _in_precision(dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Weights are made in it meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield dtype
    finally:
        torch.set_default_dtype(before)


@lru_cache(maxsize=1)
def _loaded(name: str, data_dir: Path) -> Dataset:
    return load(name, data_dir)


def _site(
    plan: Plan,
    data: Dataset,
    rows_by_site: list[Tensor],
    context: Context,
    group: ProcessGroup,
    stop: Stop,
) -> Course:
    """What one site does; the first one tells how far it is."""
    first = group.rank() == 0
    with closing(start(plan.job, data, rows_by_site, group=group)) as training:
        steps = plan.steps or plan.job.epochs * training.batches.steps
        if first:
            context.steps(steps)
        watcher = _Watcher(plan, data, training, steps, tested=first or _differ(plan))
        for loss in stop.checked(islice(_losses(training), steps)):
            watcher.step(loss)
            if first:
                context.advance()
        return watcher.course


def _losses(training: Training) -> Iterator[float]:
    return chain.from_iterable(map(training.epoch, count()))


def _differ(plan: Plan) -> bool:
    """Whether sites have models of their own, or are looked at as if."""
    job = plan.job
    own = job.method == "alone" or job.method.startswith("local-steps") or bool(job.local)
    return own or plan.per_site


class _Watcher:
    """Keeps what a site's training shows."""

    def __init__(
        self, plan: Plan, data: Dataset, training: Training, steps: int, *, tested: bool
    ) -> None:
        self._plan, self._data, self._training, self._tested = plan, data, training, tested
        self._steps, self._marks = steps, plan.marks(steps)
        model = training.replica.model
        self.course = Course(parameters=sum(p.numel() for p in model.parameters()))

    def step(self, loss: float) -> None:
        """A step is done."""
        self.course.losses.append(loss)
        done = len(self.course.losses)
        if done not in self._marks:
            return
        model = self._training.replica.model
        if self._plan.ranks and self._tested:
            self.course.ranks.append((done, effective_ranks(model)))
        if done == self._steps:
            self._training.replica.finish()
        self.course.sent_bytes.append(self._training.replica.total_sent_bytes(done))
        if self._plan.job.method not in ("pooled", "alone"):
            _share_statistics(model, self._training.group)
        if self._tested:
            self.course.tests.append((done, scores(model, self._data, self._plan.test_rows)))


@torch.no_grad()
def _share_statistics(model: nn.Module, group: Group) -> None:
    """Makes running statistics of norms their mean over the sites, as a consortium would."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(mean_over_sites(buffer, group))


def _summary(courses: list[Course]) -> dict[str, Any]:
    """All sites' courses as one result."""
    first, tested = courses[0], [course for course in courses if course.tests]
    return {
        "losses": [_mean(losses) for losses in zip(*(c.losses for c in courses), strict=True)],
        "tests": [_test(tested, courses, k) for k in range(len(first.tests))],
        "layers": _by_layer(first.ranks) or None,
        "parameters": first.parameters,
    }


def _test(tested: list[Course], courses: list[Course], k: int) -> dict[str, Any]:
    step, found = tested[0].tests[k][0], [course.tests[k][1] for course in tested]
    sent = [course.sent_bytes[k] for course in courses]
    counted = [nbytes for nbytes in sent if nbytes is not None]
    areas = [score.auc for score in found if score.auc is not None]
    return {
        "step": step,
        "loss": _mean([score.loss for score in found]),
        "accuracy": _mean([score.accuracy for score in found]),
        "auc": _mean(areas) if areas else None,
        "sent_bytes": _mean(counted) if counted else None,
        "sites": [score._asdict() for score in found] if len(found) > 1 else None,
    }


def _by_layer(ranks: list[tuple[int, dict[str, float]]]) -> dict[str, list[dict[str, float]]]:
    layers: dict[str, list[dict[str, float]]] = {}
    for step, found in ranks:
        for name, rank in found.items():
            layers.setdefault(name, []).append({"step": step, "effective_rank": rank})
    return layers


def _mean(values: Any) -> float:
    return sum(values) / len(values)
