"""Removal of checkpoints that newer ones replace."""

from __future__ import annotations

import logging
from pathlib import Path

from outergrad.checkpoint import folder as files
from outergrad.checkpoint.choose import Overview
from outergrad.checkpoint.folder import DamagedError, Save

_LOG = logging.getLogger("outergrad")


class Kept:
    """Checkpoints of a folder, of which all but the newest are removed.

    These are the checkpoints that this run has written or resumed from, and older complete ones,
    which are read again before they are removed. Unreadable checkpoints are never removed: somebody
    may repair them.

    Args:
        folder: folder of this site.
        keep: number of checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._saves: list[Save] = []
        self._unread: set[Save] = set()
        self._cut_short: set[Save] = set()

    def found(self, overview: Overview, newest: Save) -> None:
        """Notes the checkpoints that are there already.

        Args:
            overview: checkpoints that the sites see.
            newest: checkpoint that the training resumes from.
        """
        saves = overview.saves
        self._saves = [save for save in saves if save < newest and overview.whole(save)]
        self._unread, self._cut_short = {*self._saves}, {*filter(overview.cut_short, saves)}

    def add(self, save: Save) -> None:
        """Notes a checkpoint that all sites have written or read."""
        self._saves.append(save)

    def tidy(self) -> None:
        """Removes surplus and cut-short checkpoints; warns of those that cannot be removed."""
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
