"""Sweeps of a setting, as the learning rate: its best value per method, and the runs that need it.

The first seed runs with all values. The value with the least last test loss is the best, and the
other seeds run with it alone. Where sites keep rows for validation, the loss on these counts. In
private trainings the highest test accuracy counts: noise on the weights makes logits large, and the
loss with them, also where nearly all of them are right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outergrad_lab.experiments.frames import Result
from outergrad_lab.experiments.task import Settings, Task

Best = dict[str, Any]
"""Best value of each group of runs that differ only in it and in the seed."""


def group(settings: Settings, swept: str) -> str:
    """Returns a key of all settings except the swept one and the seed."""
    rest = {name: value for name, value in settings.items() if name not in (swept, "seed")}
    return json.dumps(rest, sort_keys=True)


def best_values(results: Iterable[Result], swept: str) -> Best:
    """Returns the values that are best at the last test of the first seed that has run."""
    found: dict[str, dict[Any, float]] = {}
    for result in _of_first_seed([r for r in results if swept in r["settings"]], swept):
        settings = result["settings"]
        found.setdefault(group(settings, swept), {})[settings[swept]] = _lacking(result)
    return {name: min(values, key=lambda v: values[v]) for name, values in found.items()}


def with_best(results: Sequence[Result], swept: str) -> list[Result]:
    """Returns the runs with the best value, and those in which nothing is swept."""
    best = best_values(results, swept)
    return [r for r in results if _is_best(r["settings"], swept, best)]


def due(tasks: Sequence[Task], results: Sequence[Result], swept: str) -> list[Task]:
    """Returns all tasks of the first seed, and the others with the best value once it is known."""
    if not swept:
        return list(tasks)
    best = best_values(results, swept)
    first = _first_seeds((task.settings for task in tasks), swept)
    done = {(group(r["settings"], swept), r["settings"].get(swept)) for r in results}
    waiting = {
        group(task.settings, swept)
        for task in tasks
        if _is_first(task.settings, swept, first)
        and (group(task.settings, swept), task.settings.get(swept)) not in done
    }
    return [
        task
        for task in tasks
        if _is_first(task.settings, swept, first)
        or (group(task.settings, swept) not in waiting and _is_best(task.settings, swept, best))
    ]


def number_due(tasks: Sequence[Task], swept: str) -> int:
    """Returns the number of tasks that will have run in the end."""
    if not swept:
        return len(tasks)
    first = _first_seeds((task.settings for task in tasks), swept)
    later = {
        (group(task.settings, swept), task.settings["seed"])
        for task in tasks
        if not _is_first(task.settings, swept, first)
    }
    return sum(_is_first(task.settings, swept, first) for task in tasks) + len(later)


def _is_best(settings: Settings, swept: str, best: Mapping[str, Any]) -> bool:
    return swept not in settings or best.get(group(settings, swept)) == settings[swept]


def _is_first(settings: Settings, swept: str, first: Mapping[str, int]) -> bool:
    return swept not in settings or settings.get("seed", 0) == first[group(settings, swept)]


def _first_seeds(all_settings: Iterable[Settings], swept: str) -> dict[str, int]:
    """Returns the smallest seed of each group."""
    found: dict[str, int] = {}
    for settings in all_settings:
        if swept in settings:
            name, seed = group(settings, swept), settings.get("seed", 0)
            found[name] = min(seed, found.get(name, seed))
    return found


def _of_first_seed(results: Sequence[Result], swept: str) -> list[Result]:
    first = _first_seeds((result["settings"] for result in results), swept)
    return [result for result in results if _is_first(result["settings"], swept, first)]


def _lacking(result: Result) -> float:
    """Returns the last loss, or the share of errors if private; infinite if there is none."""
    last = result["tests"][-1] if result["tests"] else {}
    if "epsilon" in result["settings"] and last:
        return 1 - last["accuracy"]
    loss = last.get("validation_loss", last.get("loss"))
    return math.inf if loss is None or math.isnan(loss) else loss
