"""Checkpoints of a training: their job, their interval, and resuming from them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import outergrad as og
from outergrad._whole_files import write_whole
from outergrad.checkpoint import Restored
from outergrad.checkpoint.cast import UnusableError
from outergrad.checkpoint.folder import saves_in
from outergrad.launch.errors import RecipeError
from outergrad.tools.named_methods.attach import Replica
from outergrad_lab.training.job import Job, option
from outergrad_lab.training.sites import number_in, rank_in
from outergrad_lab.training.training import Training


class Position:
    """Steps done, and what the report of the present epoch needs of them.

    Args:
        steps: batches per epoch.
        replica: replica whose bytes are counted.

    Attributes:
        done: number of steps done, in all.
        epoch: number of the present epoch, from 0.
        batch: number of its batches that are done.
        losses: losses of these batches.
        replica: replica whose bytes are counted, those sent before a restart too.
        seconds: seconds spent in steps, in all.
    """

    def __init__(self, steps: int, replica: Replica) -> None:
        self.done = self.epoch = self.batch = 0
        self.losses: list[float] = []
        self.seconds = 0.0
        self._steps, self.replica = steps, replica
        self._sent_before = 0
        self._last = time.perf_counter()

    def start(self) -> None:
        """Starts the clock."""
        self._last = time.perf_counter()

    def stop(self) -> None:
        """Adds the time since the last start or stop; what follows is no step."""
        now = time.perf_counter()
        self.seconds += now - self._last
        self._last = now

    def step(self, loss: float) -> None:
        """Counts a step."""
        self.done, self.batch = self.done + 1, self.batch + 1
        self.losses.append(loss)

    def next_epoch(self) -> None:
        """Starts the next epoch, after the report of the present one."""
        self.epoch, self.batch, self.losses = self.epoch + 1, 0, []

    def resumed(self) -> None:
        """Leaves out of the count the bytes that a session sent for restoring."""
        session = self.replica.session
        if session is not None:
            start_bytes = session.stats().total_sent_bytes - self._sent_before
            self.replica = replace(self.replica, start_bytes=start_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as plain numbers."""
        self.stop()
        return {
            "done": self.done,
            "epoch": self.epoch,
            "batch": self.batch,
            "steps": self._steps,
            "losses": list(self.losses),
            "seconds": self.seconds,
            "sent_bytes": self.replica.total_sent_bytes(self.done) or 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes; with another number of sites, after the same share of an epoch."""
        self.done, self.epoch, self.losses = state["done"], state["epoch"], list(state["losses"])
        self.batch = round(state["batch"] * self._steps / state["steps"])
        self.seconds, self._sent_before = state["seconds"], state["sent_bytes"]


MAY_CHANGE = ("sites", "epochs")
"""Settings of a job that may differ from the saved ones when it is resumed."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Settings of the checkpoints of a training.

    Attributes:
        folder: Folder of the checkpoints.
        every: Steps between two checkpoints; there is one after the last step, too.
        pause_after: Checkpoints after which to end, so that lost sites can come back.
        allow_lost: Whether to go on without the files of a lost site.
        allow_foreign: Whether to go on from checkpoints of which a site has nothing, but of others.
    """

    folder: Path
    every: int = 100
    pause_after: int | None = None
    allow_lost: bool = False
    allow_foreign: bool = False

    @property
    def begun(self) -> bool:
        """True if this site sees a checkpoint.

        Raises:
            RecipeError: It cannot look into the folder.
        """
        with self._told():
            return bool(saves_in(self.folder))

    def claim(self, job: Job) -> None:
        """Notes in the folder which job it belongs to.

        Raises:
            RecipeError: It belongs to another job, or cannot be written to.
        """
        path, begun = self.folder / "job.json", self.begun
        with self._told():
            if begun and path.exists():
                self._compare(job, path.read_bytes())
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps(asdict(job)))

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecipeError(f"--checkpoint {self.folder}: {error.strerror}") from error

    def _compare(self, job: Job, content: bytes) -> None:
        now, then = json.loads(json.dumps(asdict(job))), _object(content)
        if then is None:
            raise RecipeError(
                f"--checkpoint {self.folder}: job.json cannot be read, which says what was "
                f"trained: mend it, or remove it if you know"
            )
        for name in (field.name for field in fields(job) if field.name not in MAY_CHANGE):
            if name in then and then[name] != now[name]:
                raise RecipeError(
                    f"--checkpoint {self.folder} holds another job: {option(name)} was "
                    f"{then[name]!r} and is {now[name]!r}; name another folder, or start that job"
                )


def _object(content: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Saver:
    """Saves a training at intervals, and resumes it.

    Args:
        saving: Settings of the checkpoints; None for none.
        training: Training to save.
        position: Its progress.
        job: Its job.
        present: Numbers of the sites, where some are left out.
    """

    def __init__(
        self,
        saving: Saving | None,
        training: Training,
        position: Position,
        job: Job,
        present: tuple[int, ...] | None,
    ) -> None:
        self._saving, self._position = saving, position
        self._last = training.batches.steps, job.epochs - 1
        self._made = 0
        self._recording = training.recording
        self._first = rank_in(training.group) == 0
        if saving is not None:
            peer = training.replica.peer
            others: dict[str, Any] = {} if peer is None else {"peer": peer}
            if training.schedule:
                others["schedule"] = training.schedule
            self._checkpoints = og.Checkpoints(
                saving.folder,
                training.replica.session,
                model=training.replica.model,
                optimizer=training.optimizer,
                site=number_in(training.group, present),
                group=training.group,
                position=position,
                **others,
            )

    def restore(self) -> bool:
        """Resumes from a checkpoint, if there is one; returns whether there was.

        Raises:
            RecipeError: The job would end before that, or no checkpoint can be used.
        """
        if self._saving is None:
            return False
        found = self._found(self._saving)
        if found is None:
            return False
        self._position.resumed()
        self._recording.resume(self._position.done)
        if self._position.epoch > self._last[1]:
            raise RecipeError(
                f"--checkpoint {self._saving.folder} has done {self._position.epoch} epochs: "
                f"raise --epochs above that, or name another folder"
            )
        if self._first and found.exact:
            print(f"outergrad: {found}", file=sys.stderr, flush=True)
        return True

    def _found(self, saving: Saving) -> Restored | None:
        allowed = {"allow_lost": saving.allow_lost, "allow_foreign": saving.allow_foreign}
        try:
            return self._checkpoints.restore(**allowed)
        except UnusableError as error:
            options = " ".join(map(option, error.way.names)) if error.way else ""
            remedy = f"; {options} goes on with what there is" if options else ""
            raise RecipeError(
                f"--checkpoint {saving.folder} cannot be gone on from, and nothing in it was "
                f"changed: {'; '.join(error.problems)}. Mend these files or bring them back, or "
                f"move the folder away to begin anew{remedy}"
            ) from error

    def step(self) -> bool:
        """Saves after a step, if it is time to; returns whether the training should pause."""
        saving, position = self._saving, self._position
        if saving is None:
            return False
        last = (position.batch, position.epoch) == self._last
        if position.done % saving.every and not last:
            return False
        self._checkpoints.save(position.done)
        position.start()
        self._made += 1
        return not last and self._made == saving.pause_after
