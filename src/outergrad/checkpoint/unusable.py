"""The error where there are checkpoints, and none can be gone on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outergrad.checkpoint.choose import Allowed, Overview

_WAYS = (
    Allowed(allow_lost=True),
    Allowed(allow_foreign=True),
    Allowed(allow_lost=True, allow_foreign=True),
)


class UnusableError(ValueError):
    """There are checkpoints, and none can be gone on from; raised on all sites.

    Attributes:
        problems: what is wrong with each, a line of text per checkpoint or file.
        way: what the user could allow, so that one can be; None if nothing would help.
    """

    def __init__(self, folder: Path, problems: Sequence[str], way: Allowed | None) -> None:
        self.problems, self.way = tuple(problems), way
        remedy = "mend these files or bring them back, or move the folder away to begin anew"
        if way is not None:
            remedy += f", or let restore({way}) go on with what there is"
        super().__init__(
            f"Checkpoints: the folder {folder} cannot be gone on from, and nothing in it was "
            f"changed: {'; '.join(problems)}. On every site: {remedy}"
        )


def require_nothing(overview: Overview, folder: Path, problems: Sequence[str]) -> None:
    """Checks that where no checkpoint can be used there has never been one.

    A first one that was cut short is none: training begins anew, as it did then.

    Raises:
        UnusableError: there has been one.
    """
    if not all(overview.cut_short(save) for save in overview.saves):
        way = next((way for way in _WAYS if overview.choose(way)), None)
        raise UnusableError(folder, problems, way)
