"""Default method of `distribute`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outergrad.core.protocols import Method, Policy
from outergrad.methods.auto.chooser import Auto
from outergrad.methods.dad import DAD
from outergrad.record.coverage import Coverage

_STILL = ("local", "not trained")


def usual_method(
    *, mesh: Any, transform: Any, goes_on: bool = False
) -> tuple[Method | Policy, str]:
    """Returns `og.Auto()`, or `og.DAD()` with the reason why steps cannot be timed here.

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
    """Notes in the coverage of each parameter why the default was `og.DAD()`, if it was."""
    told = f"; og.DAD() by default, not og.Auto(): {why}"
    noted: Sequence[Any] = [
        line if line.travels in _STILL else replace(line, why=line.why + told) for line in lines
    ]
    return Coverage(tuple(noted)) if why else lines
