"""What an agreement asks of the board; it yields these, and is sent the answers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class First:
    """Writes a text into a slot, unless one stands there: what does is the answer."""

    key: str
    text: str


@dataclass(frozen=True)
class Slot:
    """What stands in such a slot is the answer; None if nothing does."""

    key: str


@dataclass(frozen=True)
class Put:
    """Writes any content."""

    key: str
    content: Any


@dataclass(frozen=True)
class Get:
    """What was put there; None if nothing was."""

    key: str


@dataclass(frozen=True)
class Farewell:
    """What a site left when it ended in order; None if it has not."""

    site: int


@dataclass(frozen=True)
class Gone:
    """Whether a site is known to write nothing more."""

    site: int


@dataclass(frozen=True)
class Rest:
    """Nothing, a little later: when something may have changed, or a time has come."""

    until: float


Request = First | Slot | Put | Get | Farewell | Gone | Rest
Asking = Generator[Request, Any, T]
