"""Progress of a training, as it is saved beside the model."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from outergrad.tools.named_methods.replica import Replica


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
