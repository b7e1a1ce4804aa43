"""Validation of what the other sites send, before any file is opened for it.

Another site may be in the hands of somebody else. Its messages become names of files here, so that
they must have the form that this library sends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from outergrad.checkpoint.cast import Selection
from outergrad.checkpoint.folder import Listing, Save, Seen
from outergrad.core.sites import Site

T = TypeVar("T")


def understood(
    told: Sequence[Any], form: Callable[[int, Any], T], what: str, sites: Sequence[Site]
) -> list[T]:
    """Returns the parsed messages of all sites.

    All sites have received the same messages, so that all raise the same error.

    Args:
        told: messages, by rank.
        form: parses a message, given its rank; raises if the message is malformed.
        what: subject of the messages, for the error.
        sites: all, for their names.

    Raises:
        ValueError: a message is malformed; names the site that sent it.
    """
    found: list[T] = []
    for rank, one in enumerate(told):
        try:
            found.append(form(rank, one))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"Checkpoints: what {sites[rank].called} says of {what} cannot be: {error}. No "
                f"file was touched for it. Start it with the same version of outergrad as the "
                f"others; if it has that, do not trust it"
            ) from error
    return found


def number(_: int, told: Any) -> int:
    """Checks that a message is a whole number of 0 or more."""
    if type(told) is not int or told < 0:
        raise ValueError(f"{told!r} is no whole number of 0 or more")
    return told


def numbers(rank: int, told: Any) -> list[int]:
    """Checks that a message is a list of whole numbers of 0 or more."""
    if not isinstance(told, list):
        raise ValueError(f"{told!r} is no list")
    return [number(rank, one) for one in told]


def mark(rank: int, told: Any) -> str:
    """Checks that a message names the file by which sites find others that share their folder."""
    if not re.fullmatch(rf"\.here-{rank}-[0-9a-f]{{8}}", told):
        raise ValueError(f"{told!r} is no name of a mark of its own")
    return told


def listed(mine: Listing) -> list[Any]:
    """Returns this site's listing as a message of JSON values."""
    return [[s.step, s.sites, s.id, s_.files, s_.unfinished, s_.problem] for s, s_ in mine.items()]


def listing(rank: int, told: Any) -> dict[Save, Seen]:
    """Parses the listing of another site."""
    found: dict[Save, Seen] = {}
    for step, sites, token, files, unfinished, problem in told:
        save = Save(number(rank, step), number(rank, sites), token)
        found[save] = Seen(tuple(numbers(rank, files)), unfinished is True, _line(problem))
    return found


def outcome_of(
    selection: Selection,
) -> Callable[[int, Any], tuple[dict[int, str], dict[int, int]]]:
    """Returns the parser of the messages about reading the files of a checkpoint.

    Returns:
        Function that returns two dicts by the number of the site that saved: the reasons why files
        cannot be read; and, of the other files, the rank of that site when it saved.
    """

    def form(rank: int, told: Any) -> tuple[dict[int, str], dict[int, int]]:
        asked, sites = selection.read_by(rank), selection.save.sites
        failed = {int(n): _line(reason) for n, reason in told["failed"].items()}
        ranks = {int(n): number(rank, then) for n, then in told["ranks"].items()}
        if {*failed, *ranks} != {*asked}:
            raise ValueError(f"it was to read the files of numbers {sorted(asked)}")
        if any(then >= sites for then in ranks.values()):
            raise ValueError(f"{sorted(ranks.values())} are no ranks of {sites} sites")
        return failed, ranks

    return form


def _line(told: Any) -> str:
    return " ".join(str(told).split())
