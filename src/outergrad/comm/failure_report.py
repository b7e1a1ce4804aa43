"""Failure reports, which a site leaves for the others when it ends or aborts.

They are read from a store that others may write to, too: reading one never raises, whatever the
store holds.
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
"""Most characters of an error that other sites are told."""

_LONGEST_TEXT = 1 << 14
_MOST_SITES = 1 << 20
_BITS = 63


@dataclass(frozen=True)
class LastStep:
    """The last step of a session on a site.

    Attributes:
        steps: number of steps that have ended, discarded ones too.
        counted: whether the last of them was applied.
    """

    steps: int = 0
    counted: bool = False


@dataclass(frozen=True)
class FailureReport:
    """The failure report of a site: how far it has come, and why it ended or aborted.

    Attributes:
        step: synchronised steps of the session before the one in which the site aborted.
        session: fingerprint of that session; 0 if the site was in none.
        voted: whether the site voted that this step may count.
        silent: sites that it waited for in vain.
        gone: sites that closed their connections: a site leaves its report before it does so.
        waited_s: seconds of its longest wait in the step in which it aborted: a site that is late
            has not waited.
        ends: last step of each session on the group, by the session's fingerprint.
        why: the site's own error, if it aborted because of one.
        timed_out: whether it aborted because it had waited for too long.
        ended: "session" or "process", if it left because that ended.
        settled: whether it has stopped waiting for the reports of others.
        made: number of steps that have ended, in all sessions on the group.
        sent: whether another site may have applied the next step: it has all that this site sends.
        goes_on: whether other sessions are left on the group, if one has ended.
        digests: digest of what was received in the last steps of each ended session.
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
    digests: Mapping[int, int] = field(default_factory=dict)

    def text(self) -> str:
        """Returns the report as JSON."""
        ends = {str(one): [end.steps, end.counted] for one, end in self.ends.items()}
        digests = {str(one): digest for one, digest in self.digests.items()}
        told = {"ends": ends, "why": printable(self.why), "digests": digests}
        return json.dumps({**vars(self), **told})

    @staticmethod
    def of(text: str) -> FailureReport | None:
        """Reads a report; returns None if it cannot be read."""
        if len(text) > _LONGEST_TEXT:
            return None
        try:
            left = json.loads(text)
            found = {f.name: _READERS[str(f.type)](left[f.name]) for f in fields(FailureReport)}
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return FailureReport(**found) if found["ended"] in ("", *ENDED) else None


def printable(text: str) -> str:
    """Returns a text as one line of bounded length, without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text[: 2 * LONGEST_WHY])
    words = " ".join(line.split())
    return words if len(words) <= LONGEST_WHY else f"{words[: LONGEST_WHY - 3]}..."


# These raise one of the errors that `FailureReport.of` catches, if a value is malformed.


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


def _digests(value: object) -> dict[int, int]:
    return {_whole(int(one)): _whole(digest) for one, digest in _a(dict, value).items()}


def _end(steps: object, counted: object) -> LastStep:
    return LastStep(_whole(steps), _a(bool, counted))


_READERS: dict[str, Callable[[object], Any]] = {
    "int": _whole,
    "bool": lambda value: _a(bool, value),
    "str": lambda value: printable(_a(str, value)),
    "float": _seconds,
    "tuple[int, ...]": lambda value: tuple(_whole(site, _MOST_SITES) for site in _a(list, value)),
    "Mapping[int, LastStep]": _ends,
    "Mapping[int, int]": _digests,
}
"""Readers of values from JSON, by the annotations of the fields."""
