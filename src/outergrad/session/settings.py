"""Settings of a session besides its model, method and sites, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outergrad.capture import weighting as _weighting
from outergrad.capture.weighting import Weighting
from outergrad.core.protocols import Recorder
from outergrad.core.sent import StepTap
from outergrad.core.transform import GradientTransform
from outergrad.drift import on_drift as _data_drift
from outergrad.session.drift import ON_DRIFT, OnDrift
from outergrad.step import buffers as _buffers
from outergrad.step.buffers import SharedBuffers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a session, as `distribute` was given them.

    Attributes:
        method: the method, as text.
        lines: description that the sites have compared.
        not_auto: why the method is not `og.Auto()`, where the user named none.
        recorders: recorders that are told of steps.
        max_bad_steps: number of steps in a row that may be skipped because a gradient is not
            finite; None if none is skipped.
        weighting: how much this site's gradient counts.
        buffers: the buffers that are shared.
        verify_every: number of shared steps between two comparisons of the replicas; None for
            never.
        on_drift: what to do if replicas differ.
        transform: changes this site's gradient before it travels.
        tap: listener on messages that is told of steps, too; None without one.
        drift: how sites exchange on a drift of data; None if they do not.
        origin: class and commit of the model, for recorders; empty without them.
    """

    method: str
    lines: Sequence[str] = ()
    not_auto: str = ""
    recorders: Sequence[Recorder] = ()
    max_bad_steps: int | None = None
    weighting: Weighting = field(default_factory=Weighting)
    buffers: SharedBuffers = field(default_factory=SharedBuffers)
    verify_every: int | None = None
    on_drift: OnDrift = "raise"
    transform: GradientTransform | None = None
    tap: StepTap | None = None
    drift: _data_drift.OnDrift | None = None
    origin: Mapping[str, str] = field(default_factory=dict)


def check_settings(
    every: Mapping[str, int | _data_drift.OnDrift],
    weighting: _weighting.Kind,
    buffers: _buffers.Kind | None,
    verify_every: int | None,
    on_drift: OnDrift,
) -> None:
    """Raises for a setting that is unknown, or does not go with the model and its methods.

    Args:
        every: k of each trained parameter, which travels at every k-th backward; or its drift.
        weighting: as for `distribute`.
        buffers: as for `distribute`.
        verify_every: as for `distribute`.
        on_drift: as for `distribute`.

    Raises:
        ValueError: names the setting.
    """
    _check_one_of("weighting", weighting, _weighting.KINDS)
    if buffers is not None:
        _check_one_of("buffers", buffers, _buffers.KINDS)
    first_with = {k: name for name, k in every.items()}
    if weighting == "samples" and len(first_with) > 1:
        (k, name), (other_k, other), *_ = sorted(first_with.items(), key=lambda one: str(one[0]))
        raise ValueError(
            f"weighting='samples': {name!r} has every={k} and {other!r} every={other_k}, of which "
            f"the samples are not the same; give all methods one every="
        )
    _check_one_of("on_drift", on_drift, ON_DRIFT)
    if verify_every is not None and (type(verify_every) is not int or verify_every < 1):
        raise ValueError(f"verify_every={verify_every!r}: pass a number of steps, 1 or more")


def _check_one_of(setting: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{setting}={value!r}: pass one of {', '.join(known)}")
