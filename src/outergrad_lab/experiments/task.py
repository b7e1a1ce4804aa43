"""Tasks of an experiment, each with a result of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

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


Settings = Mapping[str, Any]
"""Plain values, as YAML and JSON have them."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Surroundings in which a task runs.

    Attributes:
        data_dir: Folder of the data sets.
        steps: Called with the number of steps of the task, before the first.
        advance: Called when a step is done.
    """

    data_dir: Path
    steps: Callable[[int], None] = lambda count: None
    advance: Callable[[], None] = lambda: None


class Work(Protocol):
    """Work of a kind of task: a dataclass whose fields are the settings of the kind.

    Its constructor raises a `RecipeError` for impossible settings, before anything runs.
    """

    def run(self, context: Context) -> dict[str, Any]:
        """Does the work and returns plain values.

        Raises:
            RecipeError: The user made a mistake.
            SiteError: A site failed.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of an experiment.

    Attributes:
        kind: A key of `KINDS`.
        settings: Settings of the task.
    """

    kind: str
    settings: Settings = field(hash=False)

    @property
    def key(self) -> str:
        """Key of its result: other settings give another key."""
        text = json.dumps([self.kind, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items())
