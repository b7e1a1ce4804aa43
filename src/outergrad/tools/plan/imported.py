"""Import of functions that the user names on the command line as ``module:factory``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outergrad.launch.errors import RecipeError


def imported(option: str, name: str) -> Callable[[int], Any]:
    """Imports a function of one number.

    Args:
        option: Option that the name was given to, for errors.
        name: ``module:factory``; modules of the current folder come first.

    Raises:
        RecipeError: It cannot be imported or called.
    """
    module_name, _, attribute = name.partition(":")
    try:
        with _from_here():
            factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except AttributeError as error:
        raise RecipeError(f"{option} {name}: {error}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{option} {name}: cannot import {module_name!r}: {said}") from error
    if not callable(factory):
        raise RecipeError(
            f"{option} {name}: of type {type(factory).__name__}, which cannot be called: name a "
            f"function"
        )
    return factory


@contextmanager
def _from_here() -> Iterator[None]:
    """Context in which modules of the current folder can be imported, as with `python -m`."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
