"""What a user says of a session, besides the model and who takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outergrad.capture.weighting import Weighting
from outergrad.core.protocols import Recorder
from outergrad.session.drift import OnDrift
from outergrad.step.buffers import SharedBuffers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """As `distribute` was given them.

    Attributes:
        method: how gradients travel, as text.
        recorders: are told of steps.
        max_bad_steps: how many steps after each other may be skipped because a gradient is not
            finite; None if none is skipped.
        weighting: how much this site's gradient counts.
        buffers: what becomes of them.
        verify_every: after how many shared steps the replicas are compared; None for never.
        on_drift: what to do if they differ.
    """

    method: str
    recorders: Sequence[Recorder] = ()
    max_bad_steps: int | None = None
    weighting: Weighting = field(default_factory=Weighting)
    buffers: SharedBuffers = field(default_factory=SharedBuffers)
    verify_every: int | None = None
    on_drift: OnDrift = "raise"
