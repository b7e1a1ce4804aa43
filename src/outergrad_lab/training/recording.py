"""Recordings of a training for reports, with any method."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import outergrad as og
from outergrad.events import End, Evaluation, Event, Run, Scalars, Step
from outergrad.launch.errors import RecipeError
from outergrad.record.evaluation import evaluation
from outergrad.record.jsonl import JSONL
from outergrad.record.machine import machine
from outergrad.record.recorders import warn
from outergrad.tools.named_methods.attach import Replica, all_reduce_bytes
from outergrad_lab.training.sites import Group, number_in, rank_in, sites_of


class SiteJSONL(JSONL):
    """Records under the number of the site, which is not its rank where sites are left out."""

    site = 0

    def record(self, event: Event) -> None:
        """Records an event with the site's number as its rank."""
        super().record(replace(event, rank=self.site))


def recorder_into(
    folder: Path,
    every: int = 10,
    budget: float = 0.04,
    group: Group = None,
    *,
    present: Sequence[int] | None = None,
    again: bool = False,
) -> JSONL:
    """Makes the folder of a run, and removes this site's file of an earlier run.

    Args:
        folder: folder of the run.
        every: interval of recorded steps.
        budget: share of a step that measuring may take.
        group: the sites.
        present: numbers of the sites, where some are left out.
        again: whether the run is resumed: then the file stays.

    Raises:
        RecipeError: the folder cannot be written to.
    """
    try:
        recorder = SiteJSONL(folder, every=every, budget=budget)
        recorder.site = number_in(group, present)
        recorder.path.mkdir(parents=True, exist_ok=True)
        if not again:
            (recorder.path / f"site-{recorder.site}.jsonl").write_text("")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(f"--record {folder}: {reason}") from error
    return recorder


class Recording:
    """Passes events of a training to a recorder: through the session, if there is one.

    Without a session nothing is recorded of gradients, but loss, bytes and time can be compared.

    Args:
        recorder: recorder of the events; None for none.
        method: name of the method.
        replica: replica that is trained.
        group: the sites.
    """

    def __init__(
        self, recorder: JSONL | None, method: str, replica: Replica, group: Group = None
    ) -> None:
        self._recorder, self._method, self._replica = recorder, method, replica
        self._group = group
        self._session = replica.session
        self._steps, self._last = 0, time.perf_counter()

    def step(self, loss: float) -> None:
        """Records a step."""
        if self._recorder is None:
            return
        if self._session is None:
            if self._steps == 0:
                self._tell(self._run())
            if self._steps % self._recorder.every == 0:
                self._tell(self._step(self._recorder.every))
            self._steps += 1
        self.log(loss=loss)

    def resume(self, steps: int) -> None:
        """Continues after `steps` steps."""
        self._steps = steps
        if self._session is None and steps:
            self._tell(self._run())

    def log(self, **values: float) -> None:
        """Records values of the training loop."""
        if self._session is not None:
            self._session.log(**values)
        else:
            self._tell(Scalars(**self._now(), values=values))

    def log_eval(self, y: Tensor, p: Tensor) -> None:
        """Records an evaluation on rows of this site; arguments as for `Session.log_eval`."""
        if self._session is not None:
            self._session.log_eval(y, p)
        elif self._recorder is not None:
            self._tell(Evaluation(**self._now(), **evaluation(y, p)))

    def close(self) -> None:
        """Ends the recording; a session has recorded its own end."""
        if self._session is None:
            self._tell(End(**self._now()))
        if self._recorder is not None:
            self._recorder.close()

    def _tell(self, event: Event) -> None:
        if self._recorder is None:
            return
        try:
            self._recorder.record(event)
        except Exception as error:  # the other sites go on
            self._recorder = None
            warn(f"--record: {error}; nothing more is recorded")

    def _now(self) -> dict[str, Any]:
        return {"rank": rank_in(self._group), "step": self._steps, "time": time.time()}

    def _step(self, every: int) -> Step:
        sent, now = self._replica.sent_bytes or 0, time.perf_counter()
        seconds = (now - self._last) / every if self._steps else None
        self._last = now
        return Step(
            **self._now(),
            seconds=seconds,
            sent_bytes=sent,
            received_bytes=sent,
            total_sent_bytes=self._replica.total_sent_bytes(self._steps + 1) or 0,
            compress_s=0.0,
            replay_s=0.0,
            wait_s=0.0,
        )

    def _run(self) -> Run:
        model = self._replica.model
        return Run(
            **self._now(),
            sites=sites_of(self._group),
            method=self._method,
            shapes={name: tuple(p.shape) for name, p in model.named_parameters()},
            dense_bytes=all_reduce_bytes(model, self._group),
            outergrad=og.__version__,
            torch=torch.__version__,
            machine=machine(next(model.parameters()).device),
        )
