"""What a model of another library needs to be trained at two sites."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 40

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny model with random weights, and what two sites feed to it.

    Attributes:
        build: imports its library and makes the model; random numbers come from torch's stream.
        batch: the keyword arguments of a forward at a site; sizes may differ between sites.
        loss: of what the forward returns.
        blocks: patterns of the modules that edAD computes again.
        part: a pattern of parameters that travel by a method of their own in a mixture.
        context: around forward and loss.
        plain: undoes what a model in float64 cannot do.
        quick: whether it belongs to the tests that are not slow.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    loss: Callable[[Any], Tensor] = lambda output: output.loss
    blocks: tuple[str, ...] = ()
    part: str = "*.0.*"
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    plain: Callable[[Any], Any] = lambda model: None
    quick: bool = False


def tokens(source: torch.Generator, *shape: int) -> Tensor:
    """Ids of a small vocabulary without the lowest, which libraries give a meaning."""
    return torch.randint(4, VOCABULARY, shape, generator=source)


def numbers(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=source)


def labels(source: torch.Generator, count: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (count,), generator=source)


@contextmanager
def deprecated_calls() -> Iterator[None]:
    """Those that the libraries themselves make when they are imported, and when a model is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield
