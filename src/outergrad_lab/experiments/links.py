"""Planned durations of trainings over links: computing, and bytes at the rate of the link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outergrad.launch.errors import RecipeError
from outergrad.launch.links import parse_link
from outergrad_lab.experiments.frames import OF_COURSE, varied

if TYPE_CHECKING:
    from pandas import DataFrame


def over_links(frame: DataFrame, links: Sequence[str]) -> DataFrame:
    """Returns the rows of `curves` once per link, with `link` and `seconds`.

    Seconds are the steps times `compute_s`, the processor time of a step, plus the bytes that a
    site has sent by then over the rate. Nothing overlaps, and there are no delays. Among runs that
    differ only in the seed the least `compute_s` counts: other programs can only have raised it.
    """
    from pandas import concat

    alike = [name for name in varied(frame) if name not in OF_COURSE] or ["kind"]
    found = frame.groupby(alike, dropna=False, observed=True)["compute_s"].transform("min")
    return concat([_over(frame.assign(compute_s=found), link) for link in links])


def _over(frame: DataFrame, link: str) -> DataFrame:
    rate = parse_link(link).rate_bit_per_s
    if rate is None:
        raise RecipeError(f"links: {link} has no rate: use one as 100mbit")
    computing = frame["step"] * frame["compute_s"]
    return frame.assign(link=link, seconds=computing + 8 * frame["sent_bytes"] / rate)
