"""Checkpoints of all sites: written together, read together."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from operator import index
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from outergrad.checkpoint.choose import Allowed
from outergrad.checkpoint.going_on import GoingOn, found_by_all
from outergrad.checkpoint.keep import Kept
from outergrad.checkpoint.messaging import gathered
from outergrad.checkpoint.neighbours import first_of_folder
from outergrad.checkpoint.parts import Parts, Saveable
from outergrad.checkpoint.random_state import set_random_state
from outergrad.checkpoint.restored import Restored
from outergrad.checkpoint.writer import Writer
from outergrad.comm.agree import agree
from outergrad.comm.process_group import TorchDistributed
from outergrad.core.transport import Comm
from outergrad.session.session import Session
from outergrad.step.groups import end_unfinished, lost_sites_told

_LOG = logging.getLogger("outergrad")


class Checkpoints:
    """Saves all that a training goes on from, and goes on from it.

    Every site saves its own session, model, optimizer and random streams (torch, NumPy, Python);
    sites that share a folder write what they have alike once. A checkpoint counts when the files
    of all sites are there as a whole; the last `keep` of these are kept. Only what this run has
    written or read is ever removed. Every method, the making of the object too, is to be called on
    every site at the same point of the program.

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
        """Saves: between two steps, never inside a backward.

        Args:
            step: the number of steps that are done: the greatest is what `restore` takes.

        Raises:
            ValueError: on all sites: they are not at the same step, or another site could not
                save. What was saved before is still there, of this one nothing.
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
        """Goes on from the newest checkpoint of which all sites' files are there and whole.

        At the same number of sites training goes on to the bit. At another it goes on too, and
        what came of that is logged and returned: what the sites had not sent yet is shared out,
        and a site that saved nothing gets model, optimizer and others from one that did, without
        what is a site's own (`og.Local` parameters, random streams). Call it after
        `og.distribute`.

        Args:
            allow_lost: whether to go on without the files of a lost site where there is no
                checkpoint of which all are there: what it had not sent is lost.
            allow_foreign: whether to go on from a checkpoint that other sites have, where this
                one has checkpoints, but nothing of that: then the others' word and files are all
                there is for it. A site that has none at all takes theirs in any case.

        Returns:
            What was found, `restored.step` above all; None if there is nothing to go on from, as
            before the first checkpoint and where that was cut short.

        Raises:
            ValueError: on all sites: there are checkpoints, and none can be used: names each file
                and why. Nothing was changed. Or: what was saved does not fit one of them.
            OSError: this site cannot look into its folder; the others raise a ValueError.
            SiteLostError: another site is lost; it is named.
        """
        end_unfinished(self._comm.key)
        allowed = Allowed(allow_lost=bool(allow_lost), allow_foreign=bool(allow_foreign))
        with lost_sites_told(self._comm, "Checkpoints.restore on all sites", self._steps):
            return self._restore(allowed)

    @property
    def _steps(self) -> int:
        return 0 if self._session is None else self._session.stats().step

    # -- going on -------------------------------------------------------------------------------

    def _restore(self, allowed: Allowed) -> Restored | None:
        going_on, skipped, overview = found_by_all(self._comm, self._folder, self._numbers, allowed)
        self._log(f"checkpoint skipped: {line}" for line in skipped)
        if going_on is None:
            return None
        self._load(going_on)
        save, restored = going_on.save, going_on.restored
        self._kept.found(overview, save)
        if not restored.lost:  # files that are lost may come back: it is not removed later
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
        except Exception as raised:  # of a state that is no state of these parts
            error = ValueError(f"Checkpoints: {found.save} does not fit: {raised}")
        agree(self._comm, [f"step: {found.save.step}"], error, "build what was saved")
        if self._session is not None:
            self._session.load_state_dict(found.session or {})
        if found.random is not None:
            set_random_state(found.random)

    def _log(self, lines: Iterable[str]) -> None:
        """Once: all sites know the same."""
        for line in lines if self._comm.rank == 0 else ():
            _LOG.warning("%s", line)


def _comm_of(session: Session | None, group: dist.ProcessGroup | None) -> Comm:
    """The transport of a session; without one, of the group, the default one if None.

    Raises:
        RuntimeError: there is neither.
    """
    if session is not None:
        return session.transport()
    if group is None and not dist.is_initialized():
        raise RuntimeError("Checkpoints: no process group: pass session= or group=")
    return TorchDistributed().open(torch.device("cpu"), group=group)


def _numbers(comm: Comm, own: int) -> list[int]:
    """Of all sites, by rank."""
    numbers = gathered(comm, own)
    if any(type(one) is not int or one < 0 for one in numbers) or len({*numbers}) < len(numbers):
        raise ValueError(
            f"Checkpoints: the numbers of the sites are {numbers}: pass site= another number, "
            f"0 or more, on each, or leave it out"
        )
    return numbers
