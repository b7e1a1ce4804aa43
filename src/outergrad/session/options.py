"""What a user may say to `distribute`, and what goes with what."""

from __future__ import annotations

from datetime import timedelta

from outergrad.capture import weighting as _weighting
from outergrad.session.drift import ON_DRIFT
from outergrad.session.inspect import Inspection
from outergrad.step import buffers as _buffers


def check_settings(
    inspection: Inspection,
    weighting: _weighting.Kind,
    buffers: _buffers.Kind | None,
) -> None:
    """The settings of a session, and whether they go with the model and its methods.

    Raises:
        ValueError: names one that cannot be.
    """
    if weighting not in _weighting.KINDS:
        raise ValueError(f"weighting={weighting!r}: pass one of {', '.join(_weighting.KINDS)}")
    if buffers not in (None, *_buffers.KINDS):
        raise ValueError(f"buffers={buffers!r}: pass one of {', '.join(_buffers.KINDS)}")
    every = {k: name for name, k in inspection.every.items()}
    if weighting == "samples" and len(every) > 1:
        (k, name), (other_k, other), *_ = sorted(every.items())
        raise ValueError(
            f"weighting='samples': {name!r} has every={k} and {other!r} every={other_k}, of which "
            f"the samples are not the same; give all methods one every="
        )


def check_drift(verify_every: int | None, on_drift: str) -> None:
    """When replicas are compared, and what comes of it.

    Raises:
        ValueError: names one that cannot be.
    """
    if on_drift not in ON_DRIFT:
        raise ValueError(f"on_drift={on_drift!r}: pass one of {', '.join(ON_DRIFT)}")
    if verify_every is None:
        return
    if type(verify_every) is not int or verify_every < 1:
        raise ValueError(f"verify_every={verify_every!r}: pass a number of steps, 1 or more")


def time_span(timeout: float | timedelta | None) -> timedelta | None:
    """The seconds that `distribute` was given.

    Raises:
        ValueError: they are not above 0.
    """
    if timeout is None or isinstance(timeout, timedelta):
        span = timeout
    else:
        span = timedelta(seconds=timeout)
    if span is not None and span <= timedelta():
        raise ValueError(f"timeout={timeout!r}; use seconds above 0, or a timedelta")
    return span
