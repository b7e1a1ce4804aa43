"""What a figure draws: panels of lines, as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outergrad_lab.experiments.frames import Result, curves, finals, over_seeds, ranks, varied
from outergrad_lab.experiments.labels import LOOKS, OTHER, USUAL, Method, Style
from outergrad_lab.experiments.quantities import QUANTITIES, heading
from outergrad_lab.experiments.wanted import chosen, matching, named, names, ordered

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_COURSE = ("step", "epoch", "seconds")
_OF_COURSE = ("loss", "test_loss", "accuracy", "auc")
_SMOOTH = 40
"""A training has so many windows of the running mean."""
_MARKERS = "os^vDPXd"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line, by rising x.

    Attributes:
        label: For the legend.
        style: For matplotlib.
        x, y: Means over seeds.
        low, high: The least and the most of the seeds.
        raw: Means that are not smoothed; None where y is not either.
    """

    label: str
    style: Style
    x: Series
    y: Series
    low: Series
    high: Series
    raw: Series | None = None


@dataclass(frozen=True, kw_only=True)
class Level:
    """What a method of reference came to, a horizontal line."""

    label: str
    style: Style
    y: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        place: The values of what panels differ in.
        title: Says these.
        lines: Of the results.
        levels: To compare them with.
    """

    place: tuple[Any, ...]
    title: str
    lines: list[Line]
    levels: list[Level] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """All panels, and what their axes are.

    Attributes:
        x, y: Names of quantities or settings.
        panels: None where there is nothing to draw.
        course: Whether lines go over steps, rather than through what came out.
    """

    x: str
    y: str
    panels: list[Panel]

    course: bool

    @property
    def spent(self) -> bool:
        """Whether x are the bytes sent so far, not those of a step."""
        return self.course and self.x == "sent_bytes"


def picture(wanted: Mapping[str, Any], results: Sequence[Result]) -> Picture:
    """Finds what a figure asks for; no panels where no result has it.

    Raises:
        RecipeError: It names what no result has.
    """
    x, y = wanted["x"], wanted["y"]
    lines, panels = names(wanted["lines"]), names(wanted.get("panels"))
    frame, course = _source(wanted, results)
    where = wanted.get("where") or {}
    named(f"figure {wanted['name']}", frame, [x, y, *lines, *panels, *where])
    frame = chosen(frame, where)
    if x == "epoch" and frame["epoch"].isna().all():
        x = "step"
    frame = frame[~frame["method"].isin(names(wanted.get("references")))]
    frame = frame.dropna(subset=[x, y, *lines, *panels])
    for axis in names(wanted.get("log")):
        frame = frame[frame[x if axis == "x" else y] > 0]
    found = [
        _panel(wanted, matching(frame, panels, place), place, (x, y), results, course=course)
        for place in (ordered(frame, panels) if len(frame) else [])
    ]
    return Picture(x=x, y=y, panels=found, course=course)


def _source(wanted: Mapping[str, Any], results: Sequence[Result]) -> tuple[DataFrame, bool]:
    """The table to draw, and whether it is of steps rather than of what came out.

    Over bytes a method is a course, a family the line through its methods.
    """
    x, y = wanted["x"], wanted["y"]
    if y == "effective_rank":
        return ranks(results), True
    spent = x == "sent_bytes" and y in _OF_COURSE and "method" in names(wanted["lines"])
    if x in _COURSE or spent:
        return curves(results), True
    return finals(results), False


def _panel(
    wanted: Mapping[str, Any],
    frame: DataFrame,
    place: tuple[Any, ...],
    axes: tuple[str, str],
    results: Sequence[Result],
    *,
    course: bool,
) -> Panel:
    across, along = names(wanted.get("panels")), names(wanted["lines"])
    keys = ordered(frame, along)
    draw = _course if course else _outcomes
    return Panel(
        place=place,
        title=", ".join(map(heading, across, place)),
        lines=[
            draw(matching(frame, along, key), *axes, _label(along, key), style)
            for key, style in zip(keys, _styles(along, keys), strict=True)
        ],
        levels=_levels(wanted, across, place, axes[1], results),
    )


def _course(frame: DataFrame, x: str, y: str, label: str, style: Style) -> Line:
    """Over steps; the training loss as a running mean."""
    by_seed = frame.pivot_table(index="step", columns="seed", values=y)
    raw = None
    if y == "loss":
        raw, window = by_seed.mean(axis=1), max(1, len(by_seed) // _SMOOTH)
        by_seed = by_seed.rolling(window, center=True, min_periods=1).mean()
    return Line(
        label=label,
        style=style,
        x=frame.groupby("step")[x].mean(),
        y=by_seed.mean(axis=1),
        low=by_seed.min(axis=1),
        high=by_seed.max(axis=1),
        raw=raw,
    )


def _outcomes(frame: DataFrame, x: str, y: str, label: str, style: Style) -> Line:
    """Through the means of tasks that differ in the seed alone."""
    keys = varied(frame) if x in QUANTITIES else [x]
    found = over_seeds(frame, keys or ["kind"], y)
    found["x"] = over_seeds(frame, keys or ["kind"], x)["mean"] if x in QUANTITIES else found[x]
    found = found.sort_values("x", ignore_index=True)
    return Line(
        label=label, style=style, x=found["x"], y=found["mean"], low=found["min"], high=found["max"]
    )


def _levels(
    wanted: Mapping[str, Any],
    across: list[str],
    place: tuple[Any, ...],
    y: str,
    results: Sequence[Result],
) -> list[Level]:
    methods = names(wanted.get("references"))
    if not methods:
        return []
    y = "train_loss" if y == "loss" else y
    frame = finals(results)
    shared = {
        name: value for name, value in zip(across, place, strict=True) if _is_told(frame, name)
    }
    found = [
        (method, matching(frame, [*shared, "method"], [*shared.values(), method])[y].mean())
        for method in methods
    ]
    return [
        Level(label=Method.parse(method).label, style=Method.parse(method).look, y=value)
        for method, value in found
        if value == value
    ]


def _is_told(frame: DataFrame, name: str) -> bool:
    """Whether a reference has such a setting: a pooled training has no family and no rank."""
    return name in frame.columns and name not in ("family", "rank", "label", "method")


def _label(along: list[str], key: tuple[Any, ...]) -> str:
    return ", ".join(map(heading, along, key))


def _styles(along: list[str], keys: list[tuple[Any, ...]]) -> list[Style]:
    """Methods and families look the same everywhere; others go from dark to light."""
    looks = [
        _look(dict(zip(along, key, strict=True)), at, len(keys)) for at, key in enumerate(keys)
    ]
    seen: dict[str, int] = {}
    for look in looks:
        again = seen[look["color"]] = seen.get(look["color"], -1) + 1
        if again:
            look["linestyle"] = ((0, (4, 1.5)), (0, (1, 1)), (0, (6, 1, 1, 1)))[(again - 1) % 3]
    return looks


def _look(values: Mapping[str, Any], at: int, count: int) -> Style:
    if "method" in values:
        return Method.parse(values["method"]).look
    if "family" in values:
        return USUAL | LOOKS.get(values["family"], OTHER)
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    share = at / max(count - 1, 1)
    colour = to_hex(colormaps["viridis"](0.9 * share))
    return USUAL | {"color": colour, "marker": _MARKERS[at % len(_MARKERS)]}
