"""Events as curves in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outergrad.core.packages import how_to_install
from outergrad.core.run_figures import about, figures
from outergrad.events import (
    Change,
    Disclosure,
    Drift,
    End,
    Event,
    Exchange,
    Layer,
    Mishap,
    Run,
    Trial,
)
from outergrad.record.recorders import checked

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

_FLUSH_S = 10


class TensorBoard:
    """Writes the events of this site for TensorBoard, into `dir/site-<rank>`.

    `tensorboard --logdir dir` shows the sites as runs. Tags are `<figure>/<layer>`, e.g.
    `effective_rank/encoder.0.weight` or `sent_bytes/encoder.0.weight`, and `step/<figure>`, e.g.
    `step/seconds`. Scalars of the training loop keep their names. Singular values are histograms
    of their logarithms to base 10. How a layer is sent is a text, written when it changes. If
    training resumes from a checkpoint, entries of later steps are hidden.

    Args:
        dir: folder of the run; made if there is none.
        every: k: record every k-th step.
        budget: share of the time of a step that measuring and writing a recorded one may take:
            layers that do not fit take turns, at least one per recorded step. `math.inf`
            measures all.
        samples: record norms of single samples, too, and which stand out (`Layer.outliers`):
            every reader of the files sees them.
        groups: record singular values by group of samples, too (`Layer.group_gradient`), as
            `session.groups` labels them: every reader of the files sees the labels.

    Raises:
        ImportError: the package tensorboard is not installed.
        ValueError: a setting out of its range.
    """

    def __init__(
        self,
        dir: str | Path,
        *,
        every: int = 10,
        budget: float = 0.04,
        samples: bool = False,
        groups: bool = False,
    ) -> None:
        self.path = Path(dir)
        self.every, self.budget = checked(every, budget)
        self.samples, self.groups = samples, groups
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            needs = f"og.TensorBoard needs tensorboard: {how_to_install('tensorboard')}"
            raise ImportError(needs) from error
        self._open, self._writer = SummaryWriter, None
        self._travels: dict[str, str] = {}

    def record(self, event: Event) -> None:
        """Passes an event's numbers to TensorBoard's writer, whose thread writes the file."""
        if isinstance(event, End | Disclosure):
            return
        writer = self._writer_for(event)
        for tag, value in figures(event).items():
            writer.add_scalar(tag, value, event.step)
        if isinstance(event, Run):
            writer.add_text("run", _table(event), event.step)
        elif isinstance(event, Layer):
            self._record_layer(writer, event)
        elif isinstance(event, Mishap):
            about = f"site {', '.join(map(str, event.sites))}: {event.layer or 'no layer known'}"
            writer.add_text(f"mishap/{event.what}", about, event.step)
        elif isinstance(event, Trial):
            about = f"{event.outcome}: {', '.join(event.methods)}"
            writer.add_text("trial", about, event.step)
        elif isinstance(event, Change):
            writer.add_text("sites", f"{event.epoch}: {', '.join(event.sites)}", event.step)
        elif isinstance(event, Exchange) and event.late:
            about = f"{event.number}: without {', '.join(event.late)}"
            writer.add_text("exchange", about, event.step)
        elif isinstance(event, Drift):
            writer.add_text("drift", ", ".join(event.sites) or "no site: by most", event.step)

    def close(self) -> None:
        """Writes the rest and closes the file; a later event opens a new one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _writer_for(self, event: Event) -> SummaryWriter:
        if isinstance(event, Run):
            self.close()
        if self._writer is None:
            hides_from = event.step if isinstance(event, Run) else None
            folder = str(self.path / f"site-{event.rank}")
            self._writer = self._open(folder, purge_step=hides_from, flush_secs=_FLUSH_S)
        return self._writer

    def _record_layer(self, writer: SummaryWriter, event: Layer) -> None:
        if self._travels.get(event.layer) != event.travels:
            self._travels[event.layer] = event.travels
            writer.add_text(f"travels/{event.layer}", event.travels, event.step)
        sigma = np.array([s for s in event.singular_values or () if 0 < s < np.inf])
        if sigma.size:
            tag = f"log10_singular_values/{event.layer}"
            writer.add_histogram(tag, np.log10(sigma), event.step)


def _table(run: Run) -> str:
    told = [f"| {name} | {value} |" for name, value in about(run).items()]
    shapes = [f"| {name} | {' x '.join(map(str, shape))} |" for name, shape in run.shapes.items()]
    rule = "|---|---|"
    return "\n".join(["| run | |", rule, *told, "", "| parameter | shape |", rule, *shapes])
