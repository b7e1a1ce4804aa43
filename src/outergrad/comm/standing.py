"""What a site leaves for the others when it ends or gives up: how far it came, and why it went.

Texts of other sites are read from a store that others may write to, too: whatever stands there,
reading it raises nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")

ENDED = ("session", "process")
LONGEST_WHY = 300
"""Characters of an error that are told to other sites."""

_LONGEST_TEXT = 1 << 14
_MOST_SITES = 1 << 20
_BITS = 63


@dataclass(frozen=True)
class LastStep:
    """How the last step of a session ended on a site.

    Attributes:
        steps: how many have come to their end, discarded ones too.
        counted: whether the last of them was applied.
    """

    steps: int = 0
    counted: bool = False


@dataclass(frozen=True)
class Standing:
    """How far a site has come; what it leaves for the others.

    Attributes:
        step: synchronised steps of the session before the one in which it gave up.
        session: fingerprint of that session; 0 where it was in none.
        voted: whether it said of that step that it may count.
        silent: sites that it waited for in vain.
        gone: those whose connections were closed: who closes them leaves word before.
        waited_s: how long it had waited when it gave up: the one that is late has not.
        ends: of the sessions on the group, by their fingerprints.
        why: an error of its own, if it went because of that.
        timed_out: whether it gave up because it had waited for too long.
        ended: "session" or "process", if it left because that came to its end.
        settled: whether it has stopped waiting for the word of others.
        made: how many steps have come to their end, those of all sessions on the group.
        sent: whether some other site may have applied the next one: it has what it needs of this.
        goes_on: whether other sessions are left on the group, where one has ended.
    """

    step: int
    session: int = 0
    voted: bool = False
    silent: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    waited_s: float = 0.0
    ends: Mapping[int, LastStep] = field(default_factory=dict)
    why: str = ""
    timed_out: bool = False
    ended: str = ""
    settled: bool = False
    made: int = 0
    sent: bool = False
    goes_on: bool = False

    def text(self) -> str:
        """As it is left."""
        ends = {str(one): [end.steps, end.counted] for one, end in self.ends.items()}
        return json.dumps({**vars(self), "ends": ends, "why": printable(self.why)})

    @staticmethod
    def of(text: str) -> Standing | None:
        """What a site has left; None if it cannot be read."""
        if len(text) > _LONGEST_TEXT:
            return None
        try:
            left = json.loads(text)
            found = {f.name: _READERS[str(f.type)](left[f.name]) for f in fields(Standing)}
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return Standing(**found) if found["ended"] in ("", *ENDED) else None


def printable(text: str) -> str:
    """One line of bounded length, without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text[: 2 * LONGEST_WHY])
    words = " ".join(line.split())
    return words if len(words) <= LONGEST_WHY else f"{words[: LONGEST_WHY - 3]}..."


# These raise one of what `Standing.of` catches, if anything is not as it is left.


def _a(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"not of type {kind.__name__}")
    return value


def _whole(value: object, below: int = 1 << _BITS) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError("out of range")
    return value


def _seconds(value: object) -> float:
    if not math.isfinite(_a(float, value)):
        raise ValueError("not finite")
    return _a(float, value)


def _ends(value: object) -> dict[int, LastStep]:
    return {_whole(int(one)): _end(*_a(list, end)) for one, end in _a(dict, value).items()}


def _end(steps: object, counted: object) -> LastStep:
    return LastStep(_whole(steps), _a(bool, counted))


_READERS: dict[str, Callable[[object], Any]] = {
    "int": _whole,
    "bool": lambda value: _a(bool, value),
    "str": lambda value: printable(_a(str, value)),
    "float": _seconds,
    "tuple[int, ...]": lambda value: tuple(_whole(site, _MOST_SITES) for site in _a(list, value)),
    "Mapping[int, LastStep]": _ends,
}
"""By the types of the fields."""
