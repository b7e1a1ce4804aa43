"""Rows of a table or a figure, as an experiment's YAML requests them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.quantities import NOTHING

if TYPE_CHECKING:
    from pandas import DataFrame


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
