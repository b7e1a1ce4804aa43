"""Tables of an experiment: as CSV for programs, as Markdown and HTML for humans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outergrad._whole_files import write_whole
from outergrad.core.packages import require
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import parse_link
from outergrad_lab.experiments.asked import chosen, groups, in_order, names
from outergrad_lab.experiments.frames import (
    HEADINGS,
    Result,
    finals,
    last_ranks,
    of_kind,
    over_seeds,
    per_site,
    varied,
)
from outergrad_lab.experiments.hours import around_hub
from outergrad_lab.experiments.quantities import NOTHING, QUANTITIES, heading, text, title
from outergrad_lab.experiments.sweeps import with_best
from outergrad_lab.experiments.task import read
from outergrad_lab.labels import Method

if TYPE_CHECKING:
    from pandas import DataFrame

if TYPE_CHECKING:
    from pandas import DataFrame


Floats = np.ndarray[Any, np.dtype[np.float64]]

VERDICTS = (
    *("test_loss", "sent_bytes", "loss_gap", "gap_share"),
    *("bytes_share", "steps_to", "fewer_near"),
)
"""Measured columns per method or family."""

_AT_MOST = 1.01
"""Ratio up to which bytes count as the reference's: a method cannot always hit them."""


@dataclass(frozen=True, kw_only=True)
class Against:
    """Methods to compare with.

    Attributes:
        reference: A method.
        dense: The method that sends whole gradients.
        within: Largest relative distance to its loss that counts as near.
        links: Links over which the time until then is told, as 100mbit: a row for each.
    """

    reference: str
    dense: str = "ddp"
    within: float = 0.005
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class Course:
    """Course of one method on one workload at one number of sites, the mean over its seeds.

    Attributes:
        method: Name of the method.
        sent_bytes: Bytes sent by a site until each test.
        losses: Losses of the tests.
        steps: Steps until the last test.
        runs: Number of runs that it is the mean of.
        compute_s: Least processor time of a step, in seconds: other programs can only have raised
            it.
    """

    method: str
    sent_bytes: Floats = field(repr=False)
    losses: Floats = field(repr=False)
    steps: int
    runs: int
    compute_s: float

    @property
    def last(self) -> float:
        """Loss after the last step."""
        return float(self.losses[-1])

    @property
    def step_bytes(self) -> float:
        """Bytes sent per step and site."""
        return float(self.sent_bytes[-1]) / self.steps

    def bytes_to(self, loss: float) -> float:
        """Returns a site's bytes until the test loss stays this low; NaN if it never does."""
        above = np.flatnonzero(~(self.losses <= loss))
        if not len(above):
            return float(self.sent_bytes[0])
        last = int(above[-1])
        if last + 1 == len(self.losses):
            return math.nan
        pair = slice(last, last + 2)
        return float(np.interp(-loss, -self.losses[pair], self.sent_bytes[pair]))


def verdicts(
    results: Iterable[Result], asked: Mapping[str, Any], *, by_family: bool = False
) -> DataFrame:
    """Returns a row per workload, number of sites, optimizer and method, or family.

    Columns are `workload`, `sites`, `optimizer`, `method`, `family`, `kind`, `link` and `VERDICTS`:
    the last test loss and bytes per step; `loss_gap` to dense; `gap_share`, that gap over the
    reference's; `steps_to`, the steps until the reference's last loss; `bytes_share`, the bytes
    until then over all bytes of the reference; and `fewer_near`, the ratio of all bytes of dense to
    the bytes until the loss is near that of dense. With `links` a row stands for each link, with
    `seconds_near`: computing until the loss is near that of dense, and the bytes until then over
    the rate of the link; nothing overlaps, and there are no delays.

    In a family the best of its methods counts, and for loss and gap the best that sends no more
    than the reference. Methods with fewer seeds than the reference do not count there. Without
    results of dense or of the reference there is no row. Courses are means over the seeds that have
    run. A loss counts as reached once no later test is above it, on the line between the two tests
    where that begins; before the first test none is.
    """
    from pandas import DataFrame

    against, found = read(Against, asked), []
    for (workload, sites, optimizer), courses in _courses(results).items():
        named = {course.method: course for course in courses}
        if against.reference in named and against.dense in named:
            one, other = named[against.reference], named[against.dense]
            if by_family:
                courses = [course for course in courses if course.runs >= one.runs]
            own = [_against(course, one, other, against.within) for course in courses]
            own = _by_family(own, one) if by_family else own
            own = [row | over for row in own for over in _over_links(row, against.links)]
            place = {"workload": workload, "sites": sites, "optimizer": optimizer}
            found += [{**place, **row} for row in own]
    columns = ("kind", "workload", "sites", "optimizer", "method", "family", "seed", "link")
    return DataFrame(found).reindex(columns=[*columns, *VERDICTS, "seconds_near"])


def _courses(results: Iterable[Result]) -> dict[tuple[str, int, str], list[Course]]:
    """Returns the courses by workload, number of sites and optimizer."""
    runs: dict[tuple[str, int, str], dict[str, list[Result]]] = {}
    for result in of_kind("training", results):
        own = result["settings"]
        place = own.get("workload") or own["data"], own["sites"], own.get("optimizer", "adam")
        runs.setdefault(place, {}).setdefault(own["method"], []).append(result)
    return {
        place: [course for found in methods.items() if (course := _mean(*found))]
        for place, methods in runs.items()
    }


def _mean(method: str, runs: Sequence[Result]) -> Course | None:
    """Returns the mean course; None if bytes were not counted, or a loss is no number."""
    tests = [run["tests"] for run in runs]
    sent, losses = (
        np.array([[test[name] for test in of_run] for of_run in tests], dtype=float).mean(axis=0)
        for name in ("sent_bytes", "loss")
    )
    known = bool(np.isfinite([sent[-1], losses[-1]]).all())
    computing = min((run.get("compute_s") or math.nan for run in runs), default=math.nan)
    steps = tests[0][-1]["step"]
    return Course(method, sent, losses, steps, len(runs), computing) if known else None


def _against(course: Course, reference: Course, dense: Course, within: float) -> dict[str, Any]:
    gap = course.last - dense.last
    whole = reference.last - dense.last
    reached, near = (course.bytes_to(n) for n in (reference.last, dense.last * (1 + within)))
    return {
        "kind": "training",
        "seed": 0,
        "method": course.method,
        "family": Method.parse(course.method).family,
        "test_loss": course.last,
        "sent_bytes": course.step_bytes,
        "loss_gap": gap,
        "gap_share": gap / whole if whole > 0 else math.nan,
        "bytes_share": reached / reference.sent_bytes[-1],
        "steps_to": reached / course.step_bytes,
        "fewer_near": dense.sent_bytes[-1] / near if near else math.nan,
        "near_bytes": near,
        "near_compute_s": near / course.step_bytes * course.compute_s,
    }


def _over_links(row: Mapping[str, Any], links: Sequence[str]) -> list[dict[str, Any]]:
    """Returns for each link the time of a row; an empty row without links."""
    rates = {link: parse_link(link).rate_bit_per_s for link in links}
    if None in rates.values():
        raise RecipeError(f"links: {', '.join(links)}: one has no rate; use such as 100mbit")
    return [
        {"link": link, "seconds_near": row["near_compute_s"] + 8 * row["near_bytes"] / rate}
        for link, rate in rates.items()
        if rate is not None
    ] or [{}]


def _by_family(rows: Sequence[dict[str, Any]], reference: Course) -> list[dict[str, Any]]:
    """Returns the best of each family in each respect."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    most = _AT_MOST * reference.step_bytes
    return [_best(found, most) for found in families.values()]


def _best(rows: Sequence[dict[str, Any]], most_bytes: float) -> dict[str, Any]:
    fitting = [row for row in rows if row["sent_bytes"] <= most_bytes]
    least = min(fitting, key=lambda row: row["test_loss"], default={})
    at_these_bytes = {name: least.get(name, math.nan) for name in VERDICTS[:4]}
    to_losses = {
        "bytes_share": np.fmin.reduce([row["bytes_share"] for row in rows]),
        "steps_to": np.fmin.reduce([row["steps_to"] for row in rows]),
        "fewer_near": np.fmax.reduce([row["fewer_near"] for row in rows]),
    }
    return {**rows[0], "method": None, **at_these_bytes, **to_losses}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for humans.

    Attributes:
        name: Name of its files.
        title: Title above it.
        cells: Texts: a mean, and behind it the range of the seeds, as ``61.7 % [33.3, 90.0]``.
        keys: Number of columns that name a row.
    """

    name: str
    title: str
    cells: DataFrame
    keys: int

    @property
    def markdown(self) -> str:
        """Markdown of the table, below its title."""
        heads = list(self.cells.columns)
        rule = ["---" if at < self.keys else "---:" for at in range(len(heads))]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (heads, rule, *self.rows)]
        lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        return f"**{self.title}**\n\n{lines}"

    @property
    def rows(self) -> list[list[str]]:
        """All cells, from top to bottom."""
        return self.cells.to_numpy().tolist()


def write_tables(
    wanted: Iterable[Mapping[str, Any]], results: Iterable[Result], folder: Path
) -> list[Table]:
    """Writes for each table NAME.csv, all numbers in full, and NAME.md, for humans.

    A table without any row is left out.

    Raises:
        ImportError: pandas is missing.
        RecipeError: A table names what no result has.
    """
    require("pandas")
    results = list(results)
    written = [_write(table, results, folder) for table in wanted]
    return [table for table in written if table is not None]


def _write(wanted: Mapping[str, Any], results: Sequence[Result], folder: Path) -> Table | None:
    from pandas import concat

    rows, columns, values = (names(wanted.get(part)) for part in ("rows", "columns", "value"))
    what, keys = f"table {wanted['name']}", [*rows, *columns]
    if kind := (wanted.get("where") or {}).get("kind"):
        results = of_kind(kind, results)
    if swept := wanted.get("best"):
        results = with_best(results, swept)
    if against := wanted.get("against"):
        frame = verdicts(results, against, by_family="family" in keys)
    elif around := wanted.get("around"):
        frame = around_hub(finals(results), results, around, "steps")
    else:
        frame = _source(keys, values, results).rename(columns={"loss": "test_loss"})
    if frame.empty:
        return None
    frame = chosen(what, frame, [*keys, *values], wanted.get("where"))
    _require_alike(what, frame, keys, names(wanted.get("over")), values)
    long = concat([_in_full(_with(frame, value), keys, value) for value in values])
    write_whole(folder / f"{wanted['name']}.csv", long.to_csv(index=False))
    table = Table(
        name=wanted["name"],
        title=wanted.get("title", wanted["name"]),
        cells=_pivot(frame, rows, columns, values),
        keys=len(rows),
    )
    write_whole(folder / f"{table.name}.md", table.markdown)
    return table


def _source(keys: Sequence[str], values: Sequence[str], results: Sequence[Result]) -> DataFrame:
    if "effective_rank" in values:
        return last_ranks(results)
    return per_site(results) if "site" in keys else finals(results)


def _require_alike(
    what: str, frame: DataFrame, keys: list[str], over: list[str], values: list[str]
) -> None:
    """Checks that a cell is a mean only over seeds, and over what the table says.

    Raises:
        RecipeError: Something else would be averaged away.
    """
    for known in (_with(frame, value) for value in values):
        for name in set(varied(known)).difference(keys, over, values, ("step", "epoch")):
            if known.groupby(keys, dropna=False)[name].nunique(dropna=False).max() > 1:
                raise RecipeError(
                    f"{what}: a cell would be a mean over {name}: name it in rows "
                    f"or columns, choose by where, or say over: {name}"
                )


def _with(frame: DataFrame, value: str) -> DataFrame:
    """Returns the rows with this value; those of trainings if timings have it, too."""
    known = frame.dropna(subset=[value])
    return known[known["kind"] == min(known["kind"], key=list(HEADINGS).index, default=None)]


def _in_full(known: DataFrame, keys: list[str], value: str) -> DataFrame:
    """Returns a row per group of tasks that differ in the seed alone."""
    keys = list(dict.fromkeys([*keys, *varied(known)]))
    found = over_seeds(known, keys, value)
    found.insert(len(keys), "value", value)
    return found


def _pivot(frame: DataFrame, rows: list[str], columns: list[str], values: list[str]) -> DataFrame:
    """Returns a row per combination of `rows`, and a column per value and one of `columns`."""
    from pandas import DataFrame

    frame = frame.dropna(subset=values, how="all").dropna(subset=rows, how="all")
    frame = in_order(frame, [*rows, *columns])
    across = [c for c in groups(frame, columns) if not c or set(c) != {NOTHING}]
    places = list(product(across, values))
    cells = {value: _cells(_with(frame, value), [*rows, *columns], value) for value in values}
    return DataFrame(
        [
            [*map(text, rows, row), *(cells[v].get((*row, *at), NOTHING) for at, v in places)]
            for row in groups(frame, rows)
        ],
        columns=[*map(title, rows), *(_head(columns, at, v, values) for at, v in places)],
    )


def _cells(known: DataFrame, keys: list[str], value: str) -> dict[tuple[Any, ...], str]:
    found = over_seeds(known, keys, value)
    texts = map(QUANTITIES[value].range, *(found[name] for name in ("mean", "min", "max")))
    return dict(zip(found[keys].itertuples(index=False, name=None), texts, strict=True))


def _head(columns: list[str], at: tuple[Any, ...], value: str, values: list[str]) -> str:
    parts = list(map(heading, columns, at))
    return ", ".join([*parts, title(value)] if len(values) > 1 or not parts else parts)
