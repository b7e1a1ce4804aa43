"""What a step did, for whoever wants to know."""

from __future__ import annotations

import warnings

from outergrad._bucket import Sender
from outergrad._model import Model
from outergrad._protocols import Recorder
from outergrad._types import Event
from outergrad.comm.wire import Header
from outergrad.record.stats import LayerStats, Stats


class Reporter:
    """Hands an event per layer and step to a recorder, if there is one."""

    def __init__(self, model: Model, recorder: Recorder | None) -> None:
        self._model, self._recorder = model, recorder

    def report(self, sender: Sender, stats: Stats) -> None:
        """Tells of a step, which has been applied: so a failure must not undo it here."""
        if self._recorder is None:
            return
        try:
            for name, layer in stats.layers.items():
                self._recorder.record(self._event(sender.header, name, layer))
        except Exception as error:
            warnings.warn(f"the recorder failed and is dropped: {error!r}", stacklevel=2)
            self._recorder = None

    def _event(self, header: Header, name: str, layer: LayerStats) -> Event:
        places = zip(self._model.slots, header.uses, strict=True)
        rows = sum(use.rows for slot, use in places if slot.label == name)
        return Event(
            header.step,
            header.rank,
            name,
            layer.travels,
            rows if layer.travels != "dense" else 0,
            layer.sent_bytes,
            layer.compress_s,
        )
