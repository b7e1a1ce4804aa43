"""Checkpoints of all sites: written together, read together."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from outergrad._groups import end_unfinished
from outergrad._session import Session
from outergrad._types import StateDict
from outergrad.checkpoint import folder as files
from outergrad.checkpoint.folder import Save
from outergrad.checkpoint.going_on import GoingOn, found_by_all
from outergrad.checkpoint.neighbours import first_of_folder
from outergrad.checkpoint.parts import Part, Parts
from outergrad.checkpoint.random_state import random_state, set_random_state
from outergrad.checkpoint.restored import Restored
from outergrad.checkpoint.talk import comm_of, gathered, told_of_lost_sites
from outergrad.checkpoint.tree import digests, tensors, without
from outergrad.comm.agree import agree

_LOG = logging.getLogger("outergrad")
_TOGETHER = "call it on every site, after the same step"

T = TypeVar("T")


class Checkpoints:
    """Saves all that a training goes on from, and goes on from it.

    Every site saves its own session, model, optimizer and random streams (torch, NumPy, Python);
    sites that share a folder write what they have alike once. A checkpoint counts when the files
    of all sites are there as a whole; the last `keep` of these are kept. Every method, the making
    of the object too, is to be called on every site at the same point of the program.

    Args:
        folder: for one training. The sites may share it, or have one each on their machines.
        session: what `og.distribute` returned; None without one, as for a model in DDP.
        model: the model; the whole of it on every site.
        optimizer: its optimizer.
        keep: how many checkpoints to keep, at least 1; with 2 there is still one if the last
            turns out to be damaged.
        site: the number of this site, by which it finds what is its own; its rank if None.
        group: the sites, where there is no session; the default group if None.
        **others: what else is saved: anything with `state_dict` and `load_state_dict`, such as a
            scheduler, a scaler or a sampler, or a `torch.Generator`. Tensors, numbers, text,
            lists and dicts: files are read by `torch.load(weights_only=True)`.

    Raises:
        ValueError: on all sites: a setting is wrong, or a site cannot take part.
        TypeError: a part of this site has no state; the others raise a ValueError.
        OSError: this site cannot write to its folder; the others raise a ValueError.
    """

    def __init__(
        self,
        folder: str | Path,
        session: Session | None = None,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        keep: int = 2,
        site: int | None = None,
        group: dist.ProcessGroup | None = None,
        **others: Part,
    ) -> None:
        self._folder, self._session, self._keep = Path(folder), session, keep
        self._comm = comm_of(session, group)
        self._number = self._comm.rank if site is None else site
        optimizers = {} if optimizer is None else {"optimizer": optimizer}
        local = () if session is None else session.own_names
        self._kept: list[Save] = []
        self._proven = False
        self._parts, error = Parts({}, ()), None
        try:
            self._parts = Parts({"model": model, **optimizers, **others}, local)
            _check_keep(keep)
        except (TypeError, ValueError) as raised:
            error = raised
        doing = "looking at the folder of checkpoints"
        self._firsts = self._together(doing, lambda: self._meet(error))

    # -- what users call ------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Saves: between two steps, never inside a backward.

        Args:
            step: the number of steps that are done: the greatest is what `restore` takes.

        Raises:
            ValueError: on all sites: they are not at the same step, or another site could not
                save. What was saved before is still there.
            OSError: this site could not write.
            RuntimeError: this site lost the others.
        """
        session = None if self._session is None else self._session.state_dict()
        self._together(f"saving after step {step}", lambda: self._save(step, session))

    def restore(self, *, allow_lost: bool = False) -> Restored | None:
        """Goes on from the newest checkpoint of which all sites' files are there and whole.

        At the same number of sites training goes on to the bit. At another it goes on too, and
        what came of that is logged and returned: what the sites had not sent yet is shared out,
        and a site that saved nothing gets model, optimizer and others from one that did, without
        what is a site's own (`og.Local` parameters, random streams). Call it after
        `og.distribute`.

        Args:
            allow_lost: whether to go on without the files of a lost site where there is no
                checkpoint of which all are there: what it had not sent is lost.

        Returns:
            What was found, `restored.step` above all; None if there is nothing to go on from.

        Raises:
            ValueError: on all sites: what was saved does not fit one of them.
            RuntimeError: this site lost the others.
        """
        end_unfinished(self._comm.group)
        return self._together("restoring", lambda: self._restore(allow_lost))

    # -- together -------------------------------------------------------------------------------

    def _together(self, doing: str, work: Callable[[], T]) -> T:
        with told_of_lost_sites(self._comm, doing):
            return work()

    def _meet(self, error: Exception | None) -> list[int]:
        """Of every site the first one in its folder."""
        lines = [f"parts: {', '.join(self._parts.names)}", f"keep: {self._keep}"]
        firsts = first_of_folder(self._comm, self._folder, lines, error)
        numbers = gathered(self._comm, self._number)
        if len({*numbers}) < len(numbers) or min(numbers) < 0:
            raise ValueError(
                f"Checkpoints: the numbers of the sites are {numbers}: pass site= another number, "
                f"0 or more, on each, or leave it out"
            )
        return firsts

    @property
    def _neighbours(self) -> list[int]:
        """The sites that share this one's folder, itself among them."""
        first = self._firsts[self._comm.rank]
        return [rank for rank, other in enumerate(self._firsts) if other == first]

    # -- saving ---------------------------------------------------------------------------------

    def _save(self, step: int, session: StateDict | None) -> None:
        state, error = {}, None
        try:
            state = self._state(session)
        except Exception as raised:
            error = raised
        agree(self._comm, [f"step: {step}"], error, _TOGETHER)
        save, alike = self._settled(step, state)
        try:
            self._write(save, state, alike)
        except (OSError, ValueError) as raised:
            error = raised
        agree(self._comm, [f"saved: {save}"], error, _TOGETHER)
        self._kept = [*self._kept, save][-self._keep :]
        self._tidy()

    def _state(self, session: StateDict | None) -> StateDict:
        return {
            "rank": self._comm.rank,
            "session": session,
            "parts": self._parts.state(),
            "own": self._parts.own(),
            "random": random_state(),
        }

    def _settled(self, step: int, state: StateDict) -> tuple[Save, set[str]]:
        """The name of a checkpoint, and the tensors that all have alike who share this folder."""
        alone = len({*self._firsts}) == self._comm.world_size
        mine = {} if alone else digests(state)
        told = gathered(self._comm, {"id": secrets.token_hex(3), "digests": list(mine)})
        save = Save(step, self._comm.world_size, told[0]["id"])
        here = [{*told[rank]["digests"]} for rank in self._neighbours]
        return save, {mine[digest] for digest in set.intersection(*here)} if here[1:] else set()

    def _write(self, save: Save, state: StateDict, alike: set[str]) -> None:
        rank, number = self._comm.rank, self._number
        first = self._firsts[rank] if alike else None
        if first == rank:
            shared = {place: t for place, t in tensors(state) if place in alike}
            files.write(files.shared_file(self._folder, save, rank), shared)
        own = {"shared": first, "state": without(state, alike)}
        path = files.site_file(self._folder, save, number)
        files.write(path, own)
        if not self._proven:
            files.read(path)  # before hours depend on it
            self._proven = True

    def _tidy(self) -> None:
        if self._firsts[self._comm.rank] == self._comm.rank:
            try:
                files.remove_before(self._folder, self._kept)
            except OSError as error:
                _LOG.warning("an old checkpoint cannot be removed: %s", error)

    # -- going on -------------------------------------------------------------------------------

    def _restore(self, allow_lost: bool) -> Restored | None:
        place = self._folder, self._number
        found, skipped = found_by_all(self._comm, *place, allow_lost=allow_lost)
        self._log(f"checkpoint skipped: {line}" for line in skipped)
        if found is None:
            return None
        self._load(found)
        self._kept = [found.save]
        if not found.restored.exact:
            self._log([str(found.restored)])
        return found.restored

    def _load(self, found: GoingOn) -> None:
        error = None
        try:
            self._parts.load(found.parts, new=found.random is None)
        except ValueError as raised:
            error = raised
        agree(self._comm, [f"step: {found.save.step}"], error, "build what was saved")
        if self._session is not None:
            self._session.load_state_dict(found.session or {})
        if found.random is not None:
            set_random_state(found.random)

    def _log(self, lines: Iterable[str]) -> None:
        """Once: all sites know the same."""
        for line in lines if self._comm.rank == 0 else ():
            _LOG.warning("%s", line)


def _check_keep(keep: int) -> None:
    if keep < 1:
        raise ValueError(f"Checkpoints: keep={keep}; use 1 or more")
