"""Parts of an experiment: some of its settings, fewer seeds, fewer steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.kinds import KINDS
from outergrad_lab.experiments.spec import Experiment
from outergrad_lab.experiments.task import Settings, Task


@dataclass(frozen=True, kw_only=True)
class Part:
    """Requested part of an experiment.

    Attributes:
        only: Values of settings, as `ddp` or `sites=2`; one of several for a setting must fit. A
            value of a workload's name means the workload.
        seeds: Number of seeds, from the first on; None for all.
        steps: Steps of every training; None for those of the experiment.
    """

    only: tuple[str, ...] = ()
    seeds: int | None = None
    steps: int | None = None

    @property
    def options(self) -> str:
        """Options of the command line for this part."""
        found = [f' --only "{text}"' if " " in text else f" --only {text}" for text in self.only]
        numbers = {"--seeds": self.seeds, "--steps": self.steps}
        found += [f" {name} {number}" for name, number in numbers.items() if number is not None]
        return "".join(found)

    def of(self, experiment: Experiment) -> Experiment:
        """Returns the experiment with fewer tasks.

        Raises:
            RecipeError: It has no setting of such a value, or several, no steps, or none of its
                tasks is left.
        """
        tasks = _only(experiment.tasks, self.only)
        if self.seeds is not None:
            seeds = sorted({task.settings.get("seed", 0) for task in tasks})[: self.seeds]
            tasks = [task for task in tasks if task.settings.get("seed", 0) in seeds]
        if self.steps is not None:
            tasks = list(dict.fromkeys(_shortened(task, self.steps) for task in tasks))
        return replace(experiment, tasks=tuple(tasks), options=experiment.options + self.options)


def _only(tasks: Sequence[Task], wanted: Iterable[str]) -> list[Task]:
    """Returns the tasks that have a wanted value for each setting that is named."""
    allowed: dict[str, set[str]] = {}
    for asked in wanted:
        name, _, text = asked.partition("=")
        if not any(name in task.settings for task in tasks):
            name, text = "", asked
        values = {(n, str(v)) for task in tasks for n, v in task.settings.items()}
        names = {n for n, value in values if value == text and name in ("", n)}
        if not names:
            known = sorted({str(task.settings["workload"]) for task in tasks if _named(task)})
            among = f"; workloads are {', '.join(known)}" if known else ""
            raise RecipeError(f"--only {asked}: no run has a setting of that value{among}")
        if "workload" in names:  # it has the model or the data of the same name
            names = {"workload"}
        if len(names) > 1:
            told = " or ".join(f"--only {found}={text}" for found in sorted(names))
            raise RecipeError(f"--only {asked} is a value of several settings; write {told}")
        allowed.setdefault(names.pop(), set()).add(text)
    left = [task for task in tasks if _fits(task.settings, allowed)]
    if not left:
        raise RecipeError("--only: no run has all of these")
    return left


def _named(task: Task) -> bool:
    return "workload" in task.settings


def _fits(settings: Settings, allowed: dict[str, set[str]]) -> bool:
    return all(str(settings.get(name)) in values for name, values in allowed.items())


def _shortened(task: Task, steps: int) -> Task:
    if task.kind != "training":
        return task
    settings = {name: value for name, value in task.settings.items() if name != "epochs"}
    found = replace(task, settings={**settings, "steps": steps})
    KINDS[found.kind](found.settings)
    return found
