"""Findings of `og.Auto()`'s trials, appended to the lines of the coverage table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outergrad._amounts import seconds
from outergrad.core.choosing import Chooser, Trial
from outergrad.core.types import Unit
from outergrad.record.coverage import Coverage


def trials_noted(lines: Coverage, units: Sequence[Unit], chooser: Chooser) -> Coverage:
    """Returns the table with each parameter's chosen method, and the step times of its trials.

    Args:
        lines: the table.
        units: units of the model.
        chooser: chooser of their methods.
    """
    told = {name: _told(unit, chooser) for unit in units for name in unit.params}
    found = (replace(line, why=line.why + told.get(line.parameter, "")) for line in lines)
    return Coverage(tuple(found))


def _told(unit: Unit, chooser: Chooser) -> str:
    kept_s = chooser.kept_seconds
    took = "by the forecast" if kept_s is None else f"{seconds(kept_s)} a step"
    others = sorted(chooser.trials_of(unit), key=lambda pair: pair[1].step)
    last = dict(others)  # the last trial of each method
    return "; ".join([f"; Auto: {chooser.method_of(unit)!r}, {took}", *map(_trial, last.items())])


def _trial(of: tuple[str, Trial]) -> str:
    method, trial = of
    return f"{method} {seconds(trial.seconds)}, {trial.outcome.value} in step {trial.step}"
