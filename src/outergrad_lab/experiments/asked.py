"""Points of a figure, as its YAML requests them, and the names and looks of its lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.frames import Result, curves, finals, ranks
from outergrad_lab.experiments.hours import around_hub, over_links
from outergrad_lab.experiments.quantities import NOTHING, heading
from outergrad_lab.experiments.sweeps import with_best
from outergrad_lab.labels import LOOKS, OTHER, USUAL, Method, Style, told_apart

if TYPE_CHECKING:
    from pandas import DataFrame

if TYPE_CHECKING:
    from pandas import DataFrame


_COURSE = ("step", "epoch", "seconds", "hours")
_OF_COURSE = ("loss", "test_loss", "accuracy", "auc")
_MARKERS = "os^vDPXd"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Request of a figure's YAML, and the points that the results have for it.

    Attributes:
        title: Title of the figure.
        x, y: Names of quantities or settings.
        lines, panels: Names of the settings in which lines and panels differ.
        called: Name of each method in the legend; other methods are not drawn. If empty, all are.
        log: Axes that are logarithmic.
        references: Methods whose outcomes are levels to compare with.
        course: Whether lines go over steps, rather than through final outcomes.
        points: Rows of `curves`, `ranks` or `finals`.
    """

    title: str
    x: str
    y: str
    lines: list[str]
    panels: list[str]
    called: Mapping[str, str]
    log: list[str]
    references: list[str]
    course: bool
    points: DataFrame

    def line(self, key: tuple[Any, ...]) -> str:
        """Returns the name of a line in the legend."""
        parts = zip(self.lines, key, strict=True)
        return ", ".join(self.called.get(value) or heading(name, value) for name, value in parts)

    def looks(self, keys: Iterable[tuple[Any, ...]]) -> dict[str, Style]:
        """Returns the looks of lines, by their names in the legend."""
        first = {self.line(key): key for key in reversed(list(keys))}
        named = dict(reversed(first.items()))
        return dict(zip(named, styles(self.lines, list(named.values())), strict=True))


def ask(wanted: Mapping[str, Any], results: Sequence[Result]) -> Asked:
    """Returns the points of a figure; none where no result has what it requests.

    Raises:
        RecipeError: It names what no result has.
    """
    x, y, lines = wanted["x"], wanted["y"], names(wanted["lines"])
    panels, log, references = (names(wanted.get(n)) for n in ("panels", "log", "references"))
    # Over bytes a method is drawn as a course, and a family as a line through its methods.
    spent = x == "sent_bytes" and y in _OF_COURSE and "method" in lines
    course = x in _COURSE or spent or y == "effective_rank"
    if swept := wanted.get("best"):
        results = with_best(results, swept)
    frame = (ranks if y == "effective_rank" else curves if course else finals)(results)
    if links := names(wanted.get("links")):
        frame = over_links(frame, links)
    if around := wanted.get("around"):
        frame = around_hub(frame, results, around, "step" if course else "steps")
    what, columns = f"figure {wanted['name']}", [*lines, *panels]
    called, where = wanted.get("names") or {}, wanted.get("where") or {}
    if called:
        where = where | {"method": list(called)}
    frame = chosen(what, frame, [x, y, *columns], where)
    if called:
        order = {method: at for at, method in enumerate(called)}
        frame = frame.sort_values("method", key=lambda methods: methods.map(order), kind="stable")
    x = "step" if x == "epoch" and frame["epoch"].isna().all() else x
    frame = frame[~frame["method"].isin(references)].dropna(subset=[x, y, *columns])
    for axis in log:
        frame = frame[frame[x if axis == "x" else y] > 0]
    return Asked(
        title=wanted.get("title", wanted["name"]),
        x=x,
        y=y,
        lines=lines,
        panels=panels,
        called=called,
        log=log,
        references=references,
        course=course,
        points=in_order(frame, columns),
    )


def styles(along: list[str], keys: Sequence[tuple[Any, ...]]) -> list[Style]:
    """Returns the same look for a method or family everywhere; other lines get lighter in turn."""
    from seaborn import color_palette

    if "method" in along:
        at = along.index("method")
        return told_apart([Method.parse(key[at]).look for key in keys])
    if "family" in along:
        at = along.index("family")
        return told_apart([USUAL | LOOKS.get(key[at], OTHER) for key in keys])
    colours = color_palette("viridis", len(keys)).as_hex()
    both = zip(colours, cycle(_MARKERS), strict=False)
    return [USUAL | {"color": colour, "marker": marker} for colour, marker in both]


def names(value: str | list[str] | None) -> list[str]:
    """Returns one name, several or none as a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def chosen(
    what: str, frame: DataFrame, columns: Sequence[str], where: Mapping[str, Any] | None
) -> DataFrame:
    """Returns the rows whose settings are those of `where`; a list allows several values.

    Raises:
        RecipeError: A name of `columns` or `where` is no column; names it and the known ones.
    """
    where = where or {}
    for name in (*columns, *where):
        if name not in frame.columns:
            known = ", ".join(sorted(map(str, frame.columns)))
            raise RecipeError(f"{what}: there is no {name!r} in the results; use one of {known}")
    for name, value in where.items():
        frame = frame[frame[name].isin(value if isinstance(value, list) else [value])]
    return frame


def in_order(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Sorts columns as a reader expects: numbers rise, words keep their first order.

    Unknown values become `NOTHING` and come last.
    """
    from pandas import Categorical

    filled = frame[list(columns)].astype(object).fillna(NOTHING)
    ordered = {
        name: Categorical(filled[name], _sorted(filled[name].unique()), ordered=True)
        for name in columns
    }
    return frame.assign(**ordered)


def groups(frame: DataFrame, columns: list[str]) -> dict[tuple[Any, ...], DataFrame]:
    """Returns the rows of each combination of values, sorted; all rows if there are no columns."""
    return dict(iter(frame.groupby(columns, observed=True))) if columns else {(): frame}


def _sorted(values: Sequence[Any]) -> list[Any]:
    words = [value for value in values if isinstance(value, str) and value != NOTHING]
    numbers = sorted(value for value in values if not isinstance(value, str))
    return [*numbers, *words, NOTHING]
