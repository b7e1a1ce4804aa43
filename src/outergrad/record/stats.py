"""Bytes and seconds of synchronised steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerStats:
    """One layer, or one parameter that travelled dense, in the last synchronised step.

    Attributes:
        travels: "factors", "low rank" (sketches, merged triplets), "replayed" or "dense".
        sent_bytes: payload that this site sent for it.
        compress_s: seconds from its rows to packed factors.
        replay_s: seconds in which it was computed again for all sites.
    """

    travels: str
    sent_bytes: int
    compress_s: float
    replay_s: float = 0.0


@dataclass(frozen=True)
class Stats:
    """What this site did.

    Attributes:
        step: synchronised steps so far.
        sent_bytes: payload and headers that this site sent in the last one.
        total_sent_bytes: in all of them, including the start of the session.
        compress_s: seconds in the last step spent on turning rows into factors.
        replay_s: seconds in the last step in which blocks were computed again for all sites.
        wait_s: seconds in the last step in which the training thread waited for other sites.
        layers: the last step by layer.
    """

    step: int = 0
    sent_bytes: int = 0
    total_sent_bytes: int = 0
    compress_s: float = 0.0
    replay_s: float = 0.0
    wait_s: float = 0.0
    layers: Mapping[str, LayerStats] = field(default_factory=dict)
