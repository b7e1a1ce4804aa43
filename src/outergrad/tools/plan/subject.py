"""Subject of a plan: a model with inputs, known by name or from the user's own code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.launch.errors import RecipeError
from outergrad.tools.named_methods.attach import did_you_mean


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


_WANTED = "return (model, inputs), with inputs a tensor, a tuple or a dict of names"


@dataclass(frozen=True, kw_only=True)
class RealRows:
    """Rows of a data set.

    Attributes:
        name: Name of the data set.
        x: Inputs, or ids.
        y: Their labels.
        decode: Makes a text of ids; None where rows are no texts.
    """

    name: str
    x: Tensor
    y: Tensor
    decode: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True)
class Subject:
    """A model and the loss of a step.

    Attributes:
        name: Name as the user gave it.
        model: The model.
        rows: Rows of the batch, per site.
        loss: Runs the forward pass of the model, or of what wraps it.
        batch: Inputs and labels of the rows, if `loss` is their cross-entropy.
        real: Reads up to so many rows of the model's own data set from the folder of all data
            sets, and raises a `RecipeError` if they are not there; None where it has none.
    """

    name: str
    model: nn.Module
    rows: int
    loss: Callable[[nn.Module], Tensor]
    batch: tuple[Tensor, Tensor] | None = None
    real: Callable[[Path, int], RealRows] | None = None


@cache
def known() -> Mapping[str, Callable[[int | None], Subject]]:
    """Named models, which installed packages register as entry points `outergrad.subjects`."""
    offers = (entry.load()() for entry in entry_points(group="outergrad.subjects"))
    return {name: make for offer in offers for name, make in offer.items()}


def subject(name: str, rows: int | None) -> Subject:
    """Builds the model and a batch of random numbers.

    Args:
        name: A key of `known()`, or ``module:factory``.
        rows: Rows of the batch; the model's own if None.

    Raises:
        RecipeError: There is no such model, or it cannot be built.
    """
    torch.manual_seed(0)
    check_subject(name, rows)
    return known()[name](rows) if rows is None or name in known() else _of_factory(name, rows)


def check_subject(name: str, rows: int | None) -> None:
    """Checks the name of a model, and the rows of its batch.

    Raises:
        RecipeError: There is no such model, or it needs to know the rows.
    """
    if rows is not None and rows < 1:
        raise RecipeError(f"--rows must be 1 or more, not {rows}")
    if name in known():
        return
    if ":" not in name:
        close = did_you_mean(name, [*known()])
        raise RecipeError(
            f"--model must be one of {', '.join(known())}, or module:factory, not {name!r}{close}"
        )
    if rows is None:
        raise RecipeError(f"--model {name} needs --rows: how many the factory should make")


def try_step(subject: Subject) -> None:
    """Runs a forward and a backward pass of the plain model.

    Raises:
        RecipeError: The model fails on its inputs.
    """
    try:
        subject.loss(subject.model).backward()
    except RecipeError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise RecipeError(f"--model {subject.name}: a step of it raised {said}") from error
    subject.model.zero_grad()


def _of_factory(name: str, rows: int) -> Subject:
    made = _called(name, imported("--model", name), rows)
    if not isinstance(made, tuple) or len(made) != 2:
        what = "only a module" if isinstance(made, nn.Module) else f"a {type(made).__name__}"
        raise RecipeError(f"--model {name} returned {what}: {_WANTED}")
    model, inputs = made
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"--model {name} returned a {type(model).__name__} as its model: {_WANTED}"
        )
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise RecipeError(f"--model {name}: its model is on a GPU: build it on the CPU")
    args, kwargs = _arguments(name, inputs)
    return Subject(name, model, rows, lambda called: _mean_square(name, called(*args, **kwargs)))


def _called(name: str, factory: Callable[[int], Any], rows: int) -> Any:
    try:
        return factory(rows)
    except Exception as error:
        raise RecipeError(f"--model {name} raised {type(error).__name__}: {error}") from error


def _arguments(name: str, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, dict):
        return (), inputs
    raise RecipeError(f"--model {name} returned a {type(inputs).__name__} as inputs: {_WANTED}")


def _mean_square(name: str, output: Any) -> Tensor:
    squares = [t.float().square().mean() for t in _tensors(output) if t.requires_grad]
    if not squares:
        raise RecipeError(f"--model {name}: no tensor with a gradient comes out of its model")
    return torch.stack(squares).sum()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _tensors(part)
