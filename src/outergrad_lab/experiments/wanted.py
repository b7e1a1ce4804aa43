"""What a table or a figure asks for, found in a table of results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from outergrad.launch.errors import RecipeError

if TYPE_CHECKING:
    from pandas import DataFrame


def names(value: str | list[str] | None) -> list[str]:
    """One name, several or none, as a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def named(where: str, frame: DataFrame, wanted: Iterable[str]) -> None:
    """Checks that all are columns.

    Raises:
        RecipeError: One is not; names it and what there is.
    """
    for name in wanted:
        if name not in frame.columns:
            known = ", ".join(sorted(map(str, frame.columns)))
            raise RecipeError(f"{where}: there is no {name!r} in the results; use one of {known}")


def ordered(frame: DataFrame, columns: list[str]) -> list[tuple[Any, ...]]:
    """The combinations of their values that are there: numbers rise, words come as they came.

    What is not known is None, and comes last; where nothing is known there is no combination.
    No columns have one combination, the empty one.
    """
    places = [{value: at for at, value in enumerate(_values(frame, name))} for name in columns]
    known = [row for row in combinations(frame, columns) if any(v is not None for v in row)]
    return sorted(known, key=lambda row: list(map(_place, places, row))) if columns else [()]


def combinations(frame: DataFrame, columns: list[str]) -> list[tuple[Any, ...]]:
    """Those that are there, as they came; None for what is not known."""
    rows = zip(*(frame[name] for name in columns), strict=True)
    return list(dict.fromkeys(tuple(None if v != v else v for v in row) for row in rows))


def matching(frame: DataFrame, columns: list[str], values: Iterable[Any]) -> DataFrame:
    """The rows with these values."""
    for name, value in zip(columns, values, strict=True):
        frame = frame[frame[name].isna() if value is None else frame[name] == value]
    return frame


def chosen(frame: DataFrame, where: Mapping[str, Any] | None) -> DataFrame:
    """The rows whose settings are these; a list allows several values."""
    for name, value in (where or {}).items():
        values = value if isinstance(value, list) else [value]
        frame = frame[frame[name].isin(values)]
    return frame


def _place(places: dict[Any, int], value: Any) -> int:
    return len(places) if value is None else places[value]


def _values(frame: DataFrame, name: str) -> list[Any]:
    found = list(frame[name].dropna().unique())
    words = [value for value in found if isinstance(value, str)]
    return sorted(value for value in found if not isinstance(value, str)) + words
