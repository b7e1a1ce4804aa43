"""Requests that an agreement yields to the board; the answers are sent to its generator."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class First:
    """Writes a text into a slot if it is empty; the answer is the text that stands there then."""

    key: str
    text: str


@dataclass(frozen=True)
class Slot:
    """Reads a slot of `First`; the answer is None if it is empty."""

    key: str


@dataclass(frozen=True)
class Put:
    """Writes any content."""

    key: str
    content: Any


@dataclass(frozen=True)
class Get:
    """Reads what `Put` wrote; the answer is None if nothing was."""

    key: str


@dataclass(frozen=True)
class Farewell:
    """Reads the text a site left when it ended in order; the answer is None if there is none."""

    site: int


@dataclass(frozen=True)
class Gone:
    """Asks if a site is known to write nothing more; the answer is a bool."""

    site: int


@dataclass(frozen=True)
class Rest:
    """Pauses until something may have changed, or `until` is reached; the answer is None."""

    until: float


Request = First | Slot | Put | Get | Farewell | Gone | Rest
Asking = Generator[Request, Any, T]
