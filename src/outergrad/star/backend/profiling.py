"""Collectives as events of PyTorch's profiler, under the names that those of gloo have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.autograd.profiler as profiler

from outergrad.star.backend.works import LineWork


def recorded(event: str, collective: Callable[..., Any]) -> Callable[..., LineWork]:
    """Returns a collective that shows in profiles, from its start until its result is there.

    Args:
        event: name of the event.
        collective: method of a process group.
    """

    @wraps(collective)
    def shown(*args: Any, **kwargs: Any) -> LineWork:
        if not profiler._is_profiler_enabled:
            return collective(*args, **kwargs)
        record = profiler.record_function(event)
        with record:
            work = collective(*args, **kwargs)
            # From here on the future ends the event, and the context does not.
            record._call_end_callbacks_on_future(work.get_future())
        return work

    return shown
