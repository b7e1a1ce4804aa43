"""Reader of YAML settings into a dataclass, whose fields are the possible settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from outergrad.launch.errors import RecipeError

T = TypeVar("T")

_WORDS = {str: "a text", bool: "true or false", dict: "names with values"}
_LISTS = {str: "names", int: "whole numbers", dict: "names with values"}
"""Contents of a list, in words."""


def at_least(least: int, default: Any = MISSING) -> Any:
    """Returns a field for a whole number with a lower bound."""
    return field(default=default, metadata={"least": least})


def read(kind: type[T], given: Mapping[str, Any], what: str = "setting") -> T:
    """Makes a dataclass of settings; an empty setting counts as left out.

    Args:
        kind: Dataclass whose fields are texts, numbers above 0, whole numbers, truths, dicts, or
            tuples of these.
        given: Plain values by name.
        what: Word for a field in errors.

    Raises:
        RecipeError: A name is missing or unknown, or a value not of its field's type.
    """
    known = {one.name: one for one in fields(kind)}  # pyright: ignore[reportArgumentType]
    require_known(given, known, what)
    needed = [name for name, one in known.items() if one.default is one.default_factory is MISSING]
    for name in needed:
        if given.get(name) is None:
            raise RecipeError(f"{name} is missing: {', '.join(needed)} are needed")
    hints = get_type_hints(kind)
    values = {name: value for name, value in given.items() if value is not None}
    return kind(**{name: _read(known[name], hints[name], values[name]) for name in values})


def require_known(given: Collection[str], known: Collection[str], what: str) -> None:
    """Raises `RecipeError` for names that are not known."""
    for name in given:
        if name not in known:
            raise RecipeError(f"no {what} {name!r}: there are {', '.join(known)}")


def _read(one: Field[Any], hint: Any, value: Any) -> Any:
    if get_origin(hint) is UnionType:  # with None
        hint = get_args(hint)[0]
    right, wanted = _judged(hint, value, one.metadata.get("least", 0))
    if not right:
        raise RecipeError(f"{one.name} must be {wanted}, not {value!r}")
    return tuple(value) if isinstance(value, list) else value


def _judged(hint: Any, value: Any, least: int) -> tuple[bool, str]:
    """Returns whether a value is of a type, and a description of the type."""
    if get_origin(hint) is tuple:
        item = get_origin(get_args(hint)[0]) or get_args(hint)[0]
        right = isinstance(value, list | tuple) and all(type(one) is item for one in value)
        return right, f"a list of {_LISTS[item]}"
    if hint is int:
        return type(value) is int and value >= least, f"a whole number of {least} or more"
    if hint is float:
        return type(value) in (int, float) and value > 0, "a number above 0, as 0.001"
    plain = get_origin(hint) or hint
    return type(value) is plain, _WORDS[plain]
