"""Products of parameters, of which a part runs in which every value still has its turn."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest

LONG = bool(os.environ.get("OUTERGRAD_LONG"))


def covering(*axes: Mapping[Any, Any] | Iterable[Any], quick: int = 1, every: int = 1) -> list[Any]:
    """Combinations of a value of each axis, to be the parameters of a test.

    A combination's number is the sum of its places on the axes. Multiples of `quick` are not slow,
    other multiples of `every` are, and the rest waits for OUTERGRAD_LONG=1. Two axes whose values
    are all to meet leave the choice to a third, which has at least `every` values. Those that are
    not slow need not have all values: `make test` is a sample.

    Args:
        axes: Names and values, or values whose names are their own.
        quick: Of how many combinations one is not slow; 0 if all are.
        every: Of how many one runs at all; divides `quick`.
    """
    named = [_named(axis) for axis in axes]
    assert quick % every == 0
    for k in range(len(named)):
        others = [len(axis) - 1 for axis in [*named[:k], *named[k + 1 :]]]
        assert sum(others) + 1 >= every, "a value of an axis would have no turn"
    found = []
    for places in product(*map(range, map(len, named))):
        number, chosen = sum(places), [axis[i] for axis, i in zip(named, places, strict=True)]
        marks = () if quick and number % quick == 0 else pytest.mark.slow
        if LONG or number % every == 0:
            name = "-".join(name for name, _ in chosen)
            found.append(pytest.param(*(value for _, value in chosen), marks=marks, id=name))
    return found


def rest_slow(names: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """All names, to be the parameters of a test, which is slow with those that are not quick."""
    names, quick = list(names), set(quick)
    assert quick <= set(names)
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow, id=name)
        for name in names
    ]


def _named(axis: Mapping[Any, Any] | Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(axis, Mapping):
        return [(str(name), value) for name, value in axis.items()]
    return [(getattr(value, "__name__", str(value)), value) for value in axis]
