"""Checkpoints of all sites: written together, read together."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable
from operator import index
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from outergrad._whole_files import write_whole
from outergrad.checkpoint import claims
from outergrad.checkpoint import folder as files
from outergrad.checkpoint.cast import Allowed, Overview, Restored
from outergrad.checkpoint.folder import DamagedError, Save
from outergrad.checkpoint.messaging import gathered
from outergrad.checkpoint.parts import Parts, Saveable, set_random_state
from outergrad.checkpoint.resume import GoingOn, found_by_all
from outergrad.checkpoint.writer import Writer
from outergrad.comm.agree import agree
from outergrad.comm.process_group import TorchDistributed
from outergrad.core.transport import Comm
from outergrad.session.session import Session
from outergrad.step.transport_state import end_unfinished, lost_sites_told


def first_of_folder(
    comm: Comm, folder: Path, lines: list[str], error: Exception | None
) -> list[int]:
    """Returns, by rank, the lowest rank that shares each site's folder; its own if none does.

    Each site leaves a file in its folder and looks for the files of the others.

    Args:
        comm: the transport.
        folder: folder of this site; created if missing.
        lines: further description that the sites must have in common.
        error: error of this site so far, if any.

    Raises:
        OSError: this site cannot write there.
        ValueError: another site cannot write, the descriptions differ, or a site names a file
            elsewhere.
    """
    mark = folder / f".here-{comm.rank}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(mark, b"", through_links=False)
    except OSError as raised:
        error = error or raised
    try:
        agree(comm, lines, error, "name the same parts for every site")
        marks = claims.understood(gathered(comm, mark.name), claims.mark, "its folder", comm.sites)
        seen = [rank for rank, name in enumerate(marks) if os.path.exists(folder / name)]
        firsts = gathered(comm, min([*seen, comm.rank]))
        return claims.understood(firsts, claims.number, "its folder", comm.sites)
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


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


class Checkpoints:
    """Saves the whole state of a training on all sites, and resumes from it.

    Every site saves its own session, model, optimizer and random streams (torch, NumPy, Python).
    Sites that share a folder write identical tensors once. A checkpoint counts once the complete
    files of all sites are there; the last `keep` checkpoints are kept. Only what this run has
    written or read is ever removed. Call every method, and the constructor, on every site at the
    same point of the program.

    Args:
        folder: for one training; shared by the sites, or one per site on its own machine.
        session: session that `og.distribute` returned; None without one, as for a model in DDP.
        model: whole model, on every site.
        optimizer: optimizer of the model.
        keep: number of checkpoints to keep, at least 1; with 2 there is still one if the last
            turns out to be damaged.
        site: number of this site, by which it finds its own files; its rank if None.
        group: process group of the sites, where there is no session; the default group if None.
        **others: further objects to save: anything with `state_dict` and `load_state_dict`, such
            as a scheduler, a scaler or a sampler, or a `torch.Generator`. Their states may hold
            tensors, numbers, text, lists and dicts: files are read by
            `torch.load(weights_only=True)`.

    Raises:
        ValueError: on all sites: a setting is wrong, or a site cannot take part.
        TypeError: an object of this site has no state; the other sites raise a ValueError.
        OSError: this site cannot write to its folder; the other sites raise a ValueError.
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
        **others: Saveable,
    ) -> None:
        self._folder, self._session = Path(folder), session
        self._comm = _comm_of(session, group)
        optimizers = {} if optimizer is None else {"optimizer": optimizer}
        local = () if session is None else session.own_names
        number, error = self._comm.rank, None
        self._parts = Parts({}, ())
        try:
            number = number if site is None else index(site)
            self._parts = Parts({"model": model, **optimizers, **others}, local)
            if keep < 1:
                raise ValueError(f"Checkpoints: keep={keep}; use 1 or more")
        except (TypeError, ValueError) as raised:
            error = raised
        lines = [f"parts: {', '.join(self._parts.names)}", f"keep: {keep}"]
        with lost_sites_told(self._comm, "Checkpoints on all sites"):
            firsts = first_of_folder(self._comm, self._folder, lines, error)
            self._numbers = _numbers(self._comm, number)
        self._kept = Kept(self._folder, keep)
        self._writer = Writer(self._comm, self._folder, number, firsts)

    # -- what users call ------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Saves a checkpoint. Call it between two steps, never inside a backward pass.

        Args:
            step: number of completed steps; `restore` prefers the greatest.

        Raises:
            ValueError: on all sites: they are not at the same step, or another site could not
                save. Earlier checkpoints are still there; nothing of this one is.
            OSError: this site could not write, as on a full disk.
            SiteLostError: another site is lost; it is named.
        """
        session = None if self._session is None else self._session.state_dict()
        with lost_sites_told(self._comm, f"Checkpoints.save({step}) on all sites", self._steps):
            about = {"rank": self._comm.rank, "session": session}
            self._kept.add(self._writer.write(step, lambda: about | self._parts.state()))
        if self._writer.first:
            self._kept.tidy()

    def restore(self, *, allow_lost: bool = False, allow_foreign: bool = False) -> Restored | None:
        """Resumes from the newest checkpoint whose files of all sites are there and intact.

        With the same number of sites training continues bit for bit. With another one it continues,
        too, and the consequences are logged and returned. Residuals that the sites had not sent are
        shared out. A site that saved nothing gets model, optimizer and others from one that did,
        without state that belongs to a single site (`og.Local` parameters, random streams). Call it
        after `og.distribute`.

        Args:
            allow_lost: whether to go on without the files of a lost site where no checkpoint is
                complete; what that site had not sent is lost.
            allow_foreign: whether to go on from a checkpoint of other sites where this one has
                checkpoints, but no file of that one. Their word and files are then the only source.
                A site without any checkpoint takes theirs in any case.

        Returns:
            Summary of the checkpoint, `restored.step` above all; None if there is nothing to resume
            from, as before the first checkpoint and where that was cut short.

        Raises:
            ValueError: on all sites: there are checkpoints, and none can be used. The message names
                each file and the reason; nothing was changed. Or: the saved state does not fit a
                site.
            OSError: this site cannot look into its folder; the other sites raise a ValueError.
            SiteLostError: another site is lost; it is named.
        """
        end_unfinished(self._comm.key)
        allowed = Allowed(allow_lost=bool(allow_lost), allow_foreign=bool(allow_foreign))
        with lost_sites_told(self._comm, "Checkpoints.restore on all sites", self._steps):
            return self._restore(allowed)

    @property
    def _steps(self) -> int:
        return 0 if self._session is None else self._session.stats().step

    # -- resuming -------------------------------------------------------------------------------

    def _restore(self, allowed: Allowed) -> Restored | None:
        going_on, skipped, overview = found_by_all(self._comm, self._folder, self._numbers, allowed)
        self._log(f"checkpoint skipped: {line}" for line in skipped)
        if going_on is None:
            return None
        self._load(going_on)
        save, restored = going_on.save, going_on.restored
        self._kept.found(overview, save)
        if not restored.lost:  # lost files may come back, so that this save is not removed later
            self._kept.add(save)
            self._writer.finish(save)
        if not restored.exact:
            self._log([str(restored)])
        return restored

    def _load(self, found: GoingOn) -> None:
        error = None
        try:
            self._parts.load(found.parts, new=found.random is None)
        except ValueError as raised:
            error = raised
        except Exception as raised:  # the state may be of other parts
            error = ValueError(f"Checkpoints: {found.save} does not fit: {raised}")
        agree(self._comm, [f"step: {found.save.step}"], error, "build what was saved")
        if self._session is not None:
            self._session.load_state_dict(found.session or {})
        if found.random is not None:
            set_random_state(found.random)

    def _log(self, lines: Iterable[str]) -> None:
        """Logs on rank 0 only, since all sites have the same lines."""
        for line in lines if self._comm.rank == 0 else ():
            _LOG.warning("%s", line)


def _comm_of(session: Session | None, group: dist.ProcessGroup | None) -> Comm:
    """Returns the transport of a session; without a session, one over the (default) group.

    Raises:
        RuntimeError: there is neither a session nor a group.
    """
    if session is not None:
        return session.transport()
    if group is None and not dist.is_initialized():
        raise RuntimeError("Checkpoints: no process group: pass session= or group=")
    return TorchDistributed().open(torch.device("cpu"), group=group)


def _numbers(comm: Comm, own: int) -> list[int]:
    numbers = gathered(comm, own)
    if any(type(one) is not int or one < 0 for one in numbers) or len({*numbers}) < len(numbers):
        raise ValueError(
            f"Checkpoints: the numbers of the sites are {numbers}: pass site= another number, "
            f"0 or more, on each, or leave it out"
        )
    return numbers
