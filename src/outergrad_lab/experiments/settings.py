"""Reads the settings of a task."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.task import Settings


def with_defaults(
    settings: Settings, defaults: Settings, needed: Collection[str]
) -> dict[str, Any]:
    """All settings of a task.

    Args:
        settings: As they were written.
        defaults: Of what may be left out.
        needed: What may not.

    Raises:
        RecipeError: One is missing or unknown.
    """
    known = [*needed, *defaults]
    for name in settings:
        if name not in known:
            raise RecipeError(f"{name}: there is no such setting here: use {', '.join(known)}")
    for name in needed:
        if name not in settings:
            raise RecipeError(f"{name} is missing: the task needs {', '.join(needed)}")
    return {**defaults, **settings}


def whole_number(settings: Settings, name: str, least: int) -> int:
    """A setting that counts.

    Raises:
        RecipeError: It is no whole number, or too small.
    """
    value = settings[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RecipeError(f"{name} must be a whole number of {least} or more, not {value!r}")
    return value


def positive_number(settings: Settings, name: str) -> float:
    """A setting that measures.

    Raises:
        RecipeError: It is no number above 0.
    """
    value = settings[name]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise RecipeError(f"{name} must be a number above 0, not {value!r}")
    return float(value)


def names(settings: Settings, name: str) -> tuple[str, ...]:
    """A setting that lists names.

    Raises:
        RecipeError: It is no list of words.
    """
    value = settings[name]
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise RecipeError(f"{name} must be a list of names, not {value!r}")
    return tuple(value)
