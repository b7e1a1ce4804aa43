"""Writer of one checkpoint on all sites, or on none."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import index
from pathlib import Path

from outergrad.checkpoint import claims
from outergrad.checkpoint import folder as files
from outergrad.checkpoint.folder import Save, digests, tensors, without
from outergrad.checkpoint.messaging import gathered
from outergrad.comm.agree import agree
from outergrad.core.errors import ExchangeError
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict

_TOGETHER = "call it on every site, after the same step"


class Writer:
    """Writes the states of the sites; identical tensors in a shared folder are written once.

    Args:
        comm: the transport.
        folder: folder of this site.
        number: number of this site.
        firsts: lowest rank that shares each site's folder, by rank.

    Attributes:
        first: whether this site does what has to be done once per folder.
    """

    def __init__(self, comm: Comm, folder: Path, number: int, firsts: Sequence[int]) -> None:
        self._comm, self._folder, self._number = comm, folder, number
        self._first = firsts[comm.rank]
        self._here = [rank for rank, first in enumerate(firsts) if first == self._first]
        self._shares = len({*firsts}) < comm.world_size
        self.first = self._first == comm.rank
        self._proven = False

    def write(self, step: int, state_of: Callable[[], StateDict]) -> Save:
        """Writes a checkpoint; an error leaves nothing of it, unless a site is lost.

        Args:
            step: number of completed steps.
            state_of: returns the state of this site.

        Raises:
            ValueError: on all sites: they are not at the same step, or another could not write.
            Exception: the error of this site.
        """
        state, error = {}, None
        try:
            step, state = _checked(step), state_of()
        except Exception as raised:  # all sites must hear of it
            error = raised
        agree(self._comm, [f"step: {step}"], error, _TOGETHER)
        save, alike = self._settled(step, state)
        try:
            self._write(save, state, alike)
        except Exception as raised:
            error = raised
        self._end(save, error)
        return save

    def _settled(self, step: int, state: StateDict) -> tuple[Save, set[str]]:
        """Returns the name of a checkpoint, and the paths of tensors identical in this folder."""
        mine = digests(state) if self._shares else {}
        told = gathered(self._comm, [secrets.token_hex(3), list(mine)])
        sites = self._comm.world_size
        understood = partial(claims.understood, told, sites=self._comm.sites)
        named = understood(lambda _, one: Save(step, sites, one[0]), "a checkpoint")
        known = understood(lambda r, one: {*claims.numbers(r, one[1])}, "its tensors")
        here = [known[rank] for rank in self._here]
        return named[0], {mine[d] for d in set.intersection(*here)} if here[1:] else set()

    def _write(self, save: Save, state: StateDict, alike: set[str]) -> None:
        files.begin(self._folder, save)
        if alike and self.first:
            shared = {place: t for place, t in tensors(state) if place in alike}
            files.write(files.shared_file(self._folder, save, self._comm.rank), shared)
        path = files.site_file(self._folder, save, self._number)
        shared_with = self._first if alike else None
        files.write(path, {"shared": shared_with, "state": without(state, alike)})
        if not self._proven:
            files.read(path)  # checks once that files can be read back
            self._proven = True

    def _end(self, save: Save, error: Exception | None) -> None:
        try:
            agree(self._comm, [f"saved: {save}"], error, _TOGETHER)
        except ExchangeError:
            raise  # a site is lost, and what it wrote may make the checkpoint whole
        except Exception:
            files.take_back(self._folder, save, self._number, self._comm.rank)
            raise
        self.finish(save)

    def finish(self, save: Save) -> None:
        """Removes the mark of an unfinished checkpoint, once all sites have written theirs."""
        if self.first:
            with suppress(OSError):
                files.finish(self._folder, save)


def _checked(step: int) -> int:
    if index(step) < 0:
        raise ValueError(f"Checkpoints: step={step}; use 0 or more")
    return index(step)
