"""Durations of trainings around a hub: timed or planned steps, and cuts of lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outergrad.launch.errors import RecipeError
from outergrad.launch.links import parse_link
from outergrad.tools.named_methods.attach import Distributed
from outergrad_lab.experiments.frames import OF_COURSE, Result, of_kind, varied
from outergrad_lab.experiments.task import read
from outergrad_lab.peers.named import attach_of

if TYPE_CHECKING:
    from pandas import DataFrame

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


MEASURED, PLANNED = "measured", "planned"
_NEW = ("link", "times", "hours", "line_bytes", "quicker", "fewer_line")


@dataclass(frozen=True, kw_only=True)
class Around:
    """Settings of the hub in a table or a figure.

    Attributes:
        links: Lines of the sites.
        rtt: Round-trip time.
        cut_every_s: Seconds between two cuts of a line.
        reference: Method with which the others are compared, by workload.
    """

    links: tuple[str, ...]
    rtt: str
    cut_every_s: float
    reference: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Cost of a step on one link.

    Attributes:
        seconds: Seconds of a step, without cuts.
        line_bytes: Bytes on a site's line, both ways.
        cut_s: Seconds that a cut costs.
        times: Whether it was measured or planned.
    """

    seconds: float
    line_bytes: float
    cut_s: float
    times: str


def around_hub(
    frame: DataFrame, results: Iterable[Result], wanted: Mapping[str, Any], steps: str
) -> DataFrame:
    """Returns the rows of `finals` or `curves` once per link, with durations around a hub.

    New columns are `link`; `times`, whether steps were measured or planned; `hours`, cuts
    included; `line_bytes`, bytes on a site's line both ways in the whole training; and the ratios
    of the reference's bytes (`fewer_line`) and time (`quicker`) to these, where both were measured
    or both were planned.

    Steps that were not timed are planned from the computing time, the counted bytes, once up and
    once down, at the rate of the line, and its delay once per exchange. Cuts then cost nothing.

    Args:
        frame: Has a row per training, or per step of one.
        results: Results of trainings and of steps around a hub.
        wanted: Settings of an `Around`.
        steps: Name of the column with the number of steps.

    Raises:
        RecipeError: A setting is wrong.
    """
    from pandas import concat

    around, results = read(Around, wanted), list(results)
    frame = frame[frame["kind"] == "training"]
    if frame.empty:
        return frame.reindex(columns=list(dict.fromkeys([*frame.columns, "workload", *_NEW])))
    per_step = frame["sent_bytes"] / (frame["step"] if steps == "step" else 1)
    frame = frame.assign(_per_step=per_step)
    over = concat([_on_link(frame, results, around, link, steps) for link in around.links])
    return _compared(over.drop(columns="_per_step").reset_index(drop=True), around)


def _on_link(
    frame: DataFrame, results: list[Result], around: Around, link: str, steps: str
) -> DataFrame:
    timed = _timed(results, link)
    found = [
        timed.get((row["workload"], row["method"])) or _planned(row, around, link)
        for row in frame.to_dict("records")
    ]
    counts = frame[steps].astype(float)
    cuts = [1 + step.cut_s / around.cut_every_s for step in found]
    seconds = counts * [step.seconds for step in found] * cuts
    return frame.assign(
        link=link,
        times=[step.times for step in found],
        hours=seconds / 3600,
        line_bytes=counts * [step.line_bytes for step in found],
    )


def _timed(results: list[Result], link: str) -> dict[tuple[str, str], Step]:
    """Returns measured steps by workload and method; a cut costs the mean over these methods."""
    return {
        (result["settings"]["workload"], method): Step(
            seconds=step["step_s"],
            line_bytes=step["sent_bytes"] + step["received_bytes"],
            cut_s=_mean_cut_s(result),
            times=MEASURED,
        )
        for result in of_kind("star", results)
        if result["settings"]["link"] == link
        for method, step in result["steps"].items()
    }


def _mean_cut_s(result: Result) -> float:
    known = [step["cut_s"] for step in result["steps"].values() if step["cut_s"] is not None]
    return max(sum(known) / len(known), 0.0) if known else 0.0


def _planned(row: Mapping[str, Any], around: Around, link: str) -> Step:
    shaped = parse_link(link, around.rtt)
    attach = attach_of(row["method"])
    period = getattr(attach.method, "period", 1) if isinstance(attach, Distributed) else 1
    line_bytes = 2 * row["_per_step"]
    rate = shaped.rate_bit_per_s or float("inf")
    seconds = row["compute_s"] + 8 * line_bytes / rate + shaped.rtt_s / period
    return Step(seconds=seconds, line_bytes=line_bytes, cut_s=0.0, times=PLANNED)


def _compared(frame: DataFrame, around: Around) -> DataFrame:
    """Adds ratios to the reference's mean over its seeds, never of measured to planned steps."""
    is_reference = frame["method"] == frame["workload"].map(around.reference)
    keys = ["workload", "link", "times"]
    mean = frame[is_reference].groupby(keys)[["hours", "line_bytes"]].mean().reset_index()
    names = {"hours": "_hours", "line_bytes": "_bytes"}
    both = frame.merge(mean.rename(columns=names), on=keys, how="left")
    both = both.assign(
        quicker=both["_hours"] / both["hours"], fewer_line=both["_bytes"] / both["line_bytes"]
    )
    return both.drop(columns=["_hours", "_bytes"])
