"""The method of a session whose user names none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outergrad.core.protocols import Method, Policy
from outergrad.methods.auto.settings import Auto
from outergrad.methods.dad import DAD
from outergrad.record.coverage import Coverage

_STILL = ("local", "not trained")


def usual_method(
    *, mesh: Any, transform: Any, goes_on: bool = False
) -> tuple[Method | Policy, str]:
    """`og.Auto()`, or `og.DAD()` where nothing can be chosen by the time of steps, and why.

    Both are exact and show no more of a site than its gradient.
    """
    if mesh is not None:
        return DAD(), "the ranks of a site (mesh=) do not tell each other how long steps take"
    if goes_on:
        return DAD(), "sites go on where others are lost, who may have heard other times of steps"
    if transform is not None:
        return DAD(), "transform= changes every gradient before it travels"
    return Auto(), ""


def usual_noted(lines: Coverage, why: str) -> Coverage:
    """Says of each parameter that its method was nobody's wish, where that is not `og.Auto()`."""
    told = f"; og.DAD() by default, not og.Auto(): {why}"
    noted: Sequence[Any] = [
        line if line.travels in _STILL else replace(line, why=line.why + told) for line in lines
    ]
    return Coverage(tuple(noted)) if why else lines
