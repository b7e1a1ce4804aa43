"""What the other sites say, checked before a folder is looked into for it.

Another site may be in the hands of somebody else. What it says becomes names of files here, so
that it must have the form of what this library sends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from outergrad.checkpoint.choose import Selection
from outergrad.checkpoint.folder import Listing, Save, Seen

T = TypeVar("T")


def understood(told: Sequence[Any], form: Callable[[int, Any], T], what: str) -> list[T]:
    """What every site has told, in the form that it must have.

    All sites are told the same, so that all raise the same.

    Args:
        told: by rank.
        form: makes it of a rank and what that told, or raises.
        what: it is about.

    Raises:
        ValueError: a site has told something else; names it.
    """
    found: list[T] = []
    for rank, one in enumerate(told):
        try:
            found.append(form(rank, one))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"Checkpoints: what site {rank} says of {what} cannot be: {error}. No file was "
                f"touched for it. Start it with the same version of outergrad as the others; if "
                f"it has that, do not trust it"
            ) from error
    return found


def number(_: int, told: Any) -> int:
    """A whole number, 0 or more."""
    if type(told) is not int or told < 0:
        raise ValueError(f"{told!r} is no whole number of 0 or more")
    return told


def numbers(rank: int, told: Any) -> list[int]:
    """A list of those."""
    if not isinstance(told, list):
        raise ValueError(f"{told!r} is no list")
    return [number(rank, one) for one in told]


def mark(rank: int, told: Any) -> str:
    """The name of the file by which sites find out who shares their folder."""
    if not re.fullmatch(rf"\.here-{rank}-[0-9a-f]{{8}}", told):
        raise ValueError(f"{told!r} is no name of a mark of its own")
    return told


def listed(mine: Listing) -> list[Any]:
    """What a site sees, to be told."""
    return [[s.step, s.sites, s.id, s_.files, s_.unfinished, s_.problem] for s, s_ in mine.items()]


def listing(rank: int, told: Any) -> dict[Save, Seen]:
    """What another one sees."""
    found: dict[Save, Seen] = {}
    for step, sites, token, files, unfinished, problem in told:
        save = Save(number(rank, step), number(rank, sites), token)
        found[save] = Seen(tuple(numbers(rank, files)), unfinished is True, _line(problem))
    return found


def outcome_of(
    selection: Selection,
) -> Callable[[int, Any], tuple[dict[int, str], dict[int, int]]]:
    """The form of what came of reading the files of a checkpoint.

    Returns:
        Makes, per number, why a file cannot be read, and of the others the ranks of the sites that
        saved them.
    """

    def form(rank: int, told: Any) -> tuple[dict[int, str], dict[int, int]]:
        asked, sites = selection.read_by(rank), selection.save.sites
        failed = {int(n): _line(reason) for n, reason in told["failed"].items()}
        ranks = {int(n): number(rank, then) for n, then in told["ranks"].items()}
        if {*failed, *ranks} != {*asked}:
            raise ValueError(f"it was to read the files of sites {sorted(asked)}")
        if any(then >= sites for then in ranks.values()):
            raise ValueError(f"{sorted(ranks.values())} are no ranks of {sites} sites")
        return failed, ranks

    return form


def _line(told: Any) -> str:
    return " ".join(str(told).split())
