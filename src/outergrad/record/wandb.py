"""Events as curves in Weights & Biases."""

from __future__ import annotations

import math
from typing import Any

from outergrad.core.run_figures import GROUPS, about, figures
from outergrad.events import (
    Change,
    Disclosure,
    Drift,
    End,
    Event,
    Exchange,
    Layer,
    Run,
    Scalars,
    Step,
)
from outergrad.record.recorders import checked

AXIS = "outergrad/step"


class WandB:
    """Logs the events of this site to a run of Weights & Biases.

    One `run.log` per recorded step, with tags like `effective_rank/encoder.0.weight` and
    `step/seconds`, and one for each call of `session.log`, under the names given there. Each
    contains the number of synchronised steps as `outergrad/step`, the axis of these charts. The
    step of Weights & Biases itself, which may only grow, stays yours: it counts calls, including
    those of your own `run.log`, so pass no `step=` there, or log everything by `session.log`. The
    run's configuration gets an entry `outergrad`. Give each site its own run, with the same
    `group=`, or give only one site a recorder.

    Args:
        run: result of `wandb.init(...)`, which you finish yourself.
        every: k: record every k-th step.
        budget: share of the time of a step that measuring and writing a recorded one may take:
            layers that do not fit take turns, at least one per recorded step. `math.inf`
            measures all.
        samples: record norms of single samples, too, and which stand out (`Layer.outliers`):
            every reader of the run sees them.
        groups: record singular values by group of samples, too (`Layer.group_gradient`), as
            `session.groups` labels them: every reader of the run sees the labels.

    Raises:
        ValueError: a setting out of its range.
    """

    def __init__(
        self,
        run: Any,
        *,
        every: int = 10,
        budget: float = 0.04,
        samples: bool = False,
        groups: bool = False,
    ) -> None:
        self.run = run
        self.every, self.budget = checked(every, budget)
        self.samples, self.groups = samples, groups
        self._layers: dict[str, float | str] = {}
        self._defined: set[str] = set()

    def record(self, event: Event) -> None:
        """Logs an event; a layer's figures are kept until the event of their step."""
        if isinstance(event, Run):
            self._begin(event)
        elif isinstance(event, Layer):
            self._layers[f"travels/{event.layer}"] = event.travels
            self._layers.update(figures(event))
        elif not isinstance(event, End | Change | Disclosure | Drift | Exchange):
            self._log(event)

    def close(self) -> None:
        """Drops layers that have no step yet; the run stays open."""
        self._layers = {}

    def _begin(self, run: Run) -> None:
        count = sum(map(math.prod, run.shapes.values()))
        config = {**about(run), "shared_parameters": count}
        self.run.config.update({"outergrad": config}, allow_val_change=True)
        self._layers = {}
        if not self._defined:
            self.run.define_metric(AXIS, hidden=True)
        self._define(*(f"{group}/*" for group in GROUPS))

    def _log(self, event: Event) -> None:
        values = {AXIS: event.step, **figures(event)}
        if isinstance(event, Step):
            values = {**self._layers, **values}
            self._layers = {}
        elif isinstance(event, Scalars):
            self._define(*event.values)
        self.run.log(values)

    def _define(self, *names: str) -> None:
        """Makes synchronised steps the axis of these metrics."""
        for name in names:
            if name not in self._defined:
                self._defined.add(name)
                self.run.define_metric(name, step_metric=AXIS)
