"""What a step did, for whoever wants to know."""

from __future__ import annotations

import warnings

from outergrad._bucket import Sender
from outergrad._protocols import Recorder
from outergrad._types import Event
from outergrad.record.stats import LayerStats, Stats


class Reporter:
    """Hands an event per layer and step to a recorder, if there is one."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    def report(self, sender: Sender, stats: Stats) -> None:
        """Tells of a step, which has been applied: so a failure must not undo it here."""
        if self._recorder is None:
            return
        try:
            for name, layer in stats.layers.items():
                self._recorder.record(_event(sender, name, layer))
        except Exception as error:
            warnings.warn(f"the recorder failed and is dropped: {error!r}", stacklevel=2)
            self._recorder = None


def _event(sender: Sender, name: str, layer: LayerStats) -> Event:
    header = sender.header
    rows = sum(header.uses[k].rows for slot, k in sender.slot_index.items() if slot.label == name)
    return Event(
        header.step,
        header.rank,
        name,
        layer.travels,
        rows if layer.travels != "dense" else 0,
        layer.sent_bytes,
        layer.compress_s,
    )
