"""Tables of an experiment: as CSV for programs, as Markdown and HTML for humans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outergrad._whole_files import write_whole
from outergrad.launch.errors import RecipeError
from outergrad.report.recording import require
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
from outergrad_lab.experiments.verdicts import verdicts

if TYPE_CHECKING:
    from pandas import DataFrame


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
    require("pandas", extras="reproduce")
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
