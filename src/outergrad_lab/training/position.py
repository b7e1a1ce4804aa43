"""How far a training is, as it is saved beside the model."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from outergrad.tools.named_methods.replica import Replica


class Position:
    """Steps done, and what the report of the epoch that they are in needs of them.

    Args:
        steps: batches per epoch.
        replica: whose bytes are counted.

    Attributes:
        done: steps, in all.
        epoch: that is being trained, from 0.
        batch: how many of its batches are done.
        losses: of these.
        replica: whose bytes are counted, those sent before a restart too.
        seconds: spent in steps, in all.
    """

    def __init__(self, steps: int, replica: Replica) -> None:
        self.done = self.epoch = self.batch = 0
        self.losses: list[float] = []
        self.seconds = 0.0
        self._steps, self.replica = steps, replica
        self._sent_before = 0
        self._last = time.perf_counter()

    def start(self) -> None:
        """The clock runs from now on."""
        self._last = time.perf_counter()

    def stop(self) -> None:
        """What comes now is no step."""
        now = time.perf_counter()
        self.seconds += now - self._last
        self._last = now

    def step(self, loss: float) -> None:
        """A step is done."""
        self.done, self.batch = self.done + 1, self.batch + 1
        self.losses.append(loss)

    def next_epoch(self) -> None:
        """Its report is written."""
        self.epoch, self.batch, self.losses = self.epoch + 1, 0, []

    def resumed(self) -> None:
        """The session goes on, too: what has been sent since then was sent by restoring."""
        session = self.replica.session
        if session is not None:
            start_bytes = session.stats().total_sent_bytes - self._sent_before
            self.replica = replace(self.replica, start_bytes=start_bytes)

    def state_dict(self) -> dict[str, Any]:
        """As plain numbers."""
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
        """Goes on there; after the same share of an epoch, where there are more sites or fewer."""
        self.done, self.epoch, self.losses = state["done"], state["epoch"], list(state["losses"])
        self.batch = round(state["batch"] * self._steps / state["steps"])
        self.seconds, self._sent_before = state["seconds"], state["sent_bytes"]
