"""Bytes and seconds of synchronised steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outergrad.core.transport import Comm


@dataclass(frozen=True)
class LayerStats:
    """One weight, with the bias that travels with it, in the last synchronised step.

    Or another parameter that travels by itself, or a block.

    Attributes:
        travels: "factors", "low rank" (sketches, merged triplets), "sparse", "compressed",
            "replayed" or "dense".
        sent_bytes: payload that this site sent for it.
        received_bytes: that it received.
        kept_rows: R, rows that it sent, the width of the sketches or the entries; 0 for others.
        compress_s: seconds from its rows to packed factors.
        replay_s: seconds in which it was computed again for all sites.
    """

    travels: str
    sent_bytes: int = 0
    received_bytes: int = 0
    kept_rows: int = 0
    compress_s: float = 0.0
    replay_s: float = 0.0


@dataclass(frozen=True)
class Stats:
    """What this site did.

    Attributes:
        step: synchronised steps so far.
        sent_bytes: payload and headers that this site sent in the last one.
        received_bytes: that it received in it.
        total_sent_bytes: in all of them, including the start of the session.
        compress_s: seconds in the last step spent on turning rows into factors.
        replay_s: seconds in the last step in which blocks were computed again for all sites.
        wait_s: seconds in the last step in which the training thread waited for other sites.
        layers: the last step by full names of weights, of other parameters and of blocks.
    """

    step: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    total_sent_bytes: int = 0
    compress_s: float = 0.0
    replay_s: float = 0.0
    wait_s: float = 0.0
    layers: Mapping[str, LayerStats] = field(default_factory=dict)


class Since:
    """What a transport has counted since this was made: at the beginning of a step."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self._before = comm, (comm.sent_bytes, comm.received_bytes)

    def stats(self, step: int, **more: Any) -> Stats:
        """Of the step, with seconds and layers as `Stats` has them."""
        total, received = self._comm.sent_bytes, self._comm.received_bytes
        sent_before, received_before = self._before
        return Stats(step, total - sent_before, received - received_before, total, **more)
