"""Which checkpoints are removed when newer ones are there."""

from __future__ import annotations

import logging
from pathlib import Path

from outergrad.checkpoint import folder as files
from outergrad.checkpoint.choose import Overview
from outergrad.checkpoint.folder import DamagedError, Save

_LOG = logging.getLogger("outergrad")


class Kept:
    """The checkpoints of a folder of which all but the last are removed.

    These are those that this run has written or gone on from, and whole ones before that, which
    are read again before they go. What could not be read is never removed: somebody may mend it.

    Args:
        folder: of this site.
        keep: how many to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._saves: list[Save] = []
        self._unread: set[Save] = set()
        self._cut_short: set[Save] = set()

    def found(self, overview: Overview, newest: Save) -> None:
        """Some are there already.

        Args:
            overview: of all.
            newest: the one that is gone on from.
        """
        saves = overview.saves
        self._saves = [save for save in saves if save < newest and overview.whole(save)]
        self._unread, self._cut_short = {*self._saves}, {*filter(overview.cut_short, saves)}

    def add(self, save: Save) -> None:
        """One has been written or read everywhere."""
        self._saves.append(save)

    def tidy(self) -> None:
        """Removes what is not to be kept; warns of what cannot be removed."""
        gone, self._saves = self._saves[: -self._keep], self._saves[-self._keep :]
        for save in gone:
            self._remove(save, check=save in self._unread)
        useless = {save for save in self._cut_short if save.step <= max(self._saves).step}
        for save in sorted(useless):
            self._remove(save, check=False)
        self._cut_short -= useless

    def _remove(self, save: Save, *, check: bool) -> None:
        try:
            if check:
                files.check(self._folder, save)
            files.remove(self._folder, save)
        except (OSError, DamagedError) as error:
            _LOG.warning("an old checkpoint is left where it is: %s", error)
