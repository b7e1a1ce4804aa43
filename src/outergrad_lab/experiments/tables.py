"""The tables of an experiment: as CSV for programs, as Markdown and HTML for humans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outergrad._whole_files import write_whole
from outergrad.launch.errors import RecipeError
from outergrad.report.recording import require
from outergrad_lab.experiments.frames import (
    Result,
    finals,
    last_ranks,
    over_seeds,
    per_site,
    varied,
)
from outergrad_lab.experiments.quantities import NOTHING, QUANTITIES, heading, text, title
from outergrad_lab.experiments.wanted import chosen, combinations, named, names, ordered

if TYPE_CHECKING:
    from pandas import DataFrame

_KINDS = ("training", "timing", "sites", "iterations")
_OUTCOMES = ("mean", "min", "max", "count")


@dataclass(frozen=True)
class Cell:
    """What stands in a place.

    Attributes:
        text: The mean.
        spread: The least and the most of several seeds; empty where they are alike.
    """

    text: str
    spread: str = ""

    def __str__(self) -> str:
        """Both in a line."""
        return f"{self.text} {self.spread}".strip()


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for humans.

    Attributes:
        name: Of its files.
        title: What it shows.
        heads: Of all columns.
        keys: How many columns name a row.
        rows: From top to bottom; the first cells name the row.
    """

    name: str
    title: str
    heads: tuple[str, ...]
    keys: int
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def markdown(self) -> str:
        """With the title above it."""
        rule = ["---"] * self.keys + ["---:"] * (len(self.heads) - self.keys)
        rows = [list(map(str, row)) for row in self.rows]
        lines = ["| " + " | ".join(map(_piped, row)) + " |" for row in (self.heads, rule, *rows)]
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n"


def write_tables(
    wanted: Iterable[Mapping[str, Any]], results: Iterable[Result], folder: Path
) -> list[Table]:
    """Writes NAME.csv, every figure in full, and NAME.md, a table for humans, for each.

    Raises:
        ImportError: pandas is missing.
        RecipeError: One names what no result has.
    """
    require("pandas", extras="reproduce")
    results = list(results)
    return [_write(table, results, folder) for table in wanted]


def _write(wanted: Mapping[str, Any], results: Sequence[Result], folder: Path) -> Table:
    from pandas import concat

    rows, columns, values = (names(wanted.get(part)) for part in ("rows", "columns", "value"))
    where = wanted.get("where") or {}
    frame = _source(rows + columns, values)(results).rename(columns={"loss": "test_loss"})
    named(f"table {wanted['name']}", frame, [*rows, *columns, *values, *where])
    frame = chosen(frame, where)
    _require_alike(wanted, frame, rows + columns, values)
    long = concat([_outcomes(frame, rows + columns, value) for value in values])
    write_whole(folder / f"{wanted['name']}.csv", long.to_csv(index=False))
    table = _pivot(wanted, frame, rows, columns, values)
    write_whole(folder / f"{table.name}.md", table.markdown)
    return table


def _require_alike(
    wanted: Mapping[str, Any], frame: DataFrame, keys: list[str], values: list[str]
) -> None:
    """Checks that a cell is a mean over seeds, and over what the table says.

    Raises:
        RecipeError: Something else would be averaged away.
    """
    over = {*keys, *names(wanted.get("over")), "step", "epoch", *values}
    for value in values:
        known = _of_one_kind(frame, value)
        for name in set(varied(known)) - over if keys and len(known) else ():
            if known.groupby(keys, dropna=False)[name].nunique(dropna=False).max() > 1:
                raise RecipeError(
                    f"table {wanted['name']}: a cell would be a mean over {name}: name it in rows "
                    f"or columns, choose by where, or say over: {name}"
                )


def _source(keys: Sequence[str], values: Sequence[str]) -> Callable[[Sequence[Result]], DataFrame]:
    if "effective_rank" in values:
        return last_ranks
    return per_site if "site" in keys else finals


def _outcomes(frame: DataFrame, keys: list[str], value: str) -> DataFrame:
    """A row per group of tasks that differ in the seed alone."""
    known = _of_one_kind(frame, value)
    keys = list(dict.fromkeys([*keys, *varied(known)]))
    return over_seeds(known, keys, value).assign(value=value)[[*keys, "value", *_OUTCOMES]]


def _of_one_kind(frame: DataFrame, value: str) -> DataFrame:
    """The rows with this value; a training's where a timing has it too."""
    known = frame.dropna(subset=[value])
    kinds = [kind for kind in _KINDS if (known["kind"] == kind).any()]
    return known[known["kind"] == kinds[0]] if kinds else known


def _pivot(
    wanted: Mapping[str, Any],
    frame: DataFrame,
    rows: list[str],
    columns: list[str],
    values: list[str],
) -> Table:
    frame = frame.dropna(subset=values, how="all").dropna(subset=rows, how="all")
    across = list(product(ordered(frame, columns), values))
    cells = {value: _cells(frame, rows + columns, value) for value in values}
    return Table(
        name=wanted["name"],
        title=wanted.get("title", wanted["name"]),
        heads=(*map(title, rows), *(_head(columns, *place, values) for place in across)),
        keys=len(rows),
        rows=tuple(
            (
                *(Cell(text(name, part)) for name, part in zip(rows, row, strict=True)),
                *(cells[value].get((*row, *column), Cell(NOTHING)) for column, value in across),
            )
            for row in ordered(frame, rows)
        ),
    )


def _cells(frame: DataFrame, keys: list[str], value: str) -> dict[tuple[Any, ...], Cell]:
    known = _of_one_kind(frame, value)
    if not keys or known.empty:
        return {}
    table = over_seeds(known, keys, value)
    return {
        key: _cell(value, *outcome)
        for key, outcome in zip(
            combinations(table, keys), table[list(_OUTCOMES)].itertuples(index=False), strict=True
        )
    }


def _cell(value: str, mean: float, low: float, high: float, count: int) -> Cell:
    shown, least, most = QUANTITIES[value].write(mean, low, high)
    return Cell(shown, f"[{least}, {most}]" if count > 1 and least != most else "")


def _head(columns: list[str], column: tuple[Any, ...], value: str, values: list[str]) -> str:
    parts = [heading(name, part) for name, part in zip(columns, column, strict=True)]
    return ", ".join([*parts, title(value)] if len(values) > 1 or not parts else parts)


def _piped(cell: str) -> str:
    return cell.replace("|", "\\|")
