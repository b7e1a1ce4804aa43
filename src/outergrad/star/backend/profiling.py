"""Collectives as events of PyTorch's profiler, under the names that those of gloo have."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any

import torch.autograd.profiler as profiler
from torch.futures import Future

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
        record, over = profiler.record_function(event), Future[None]()
        with record:
            work = collective(*args, **kwargs)
            # From here on a future ends the event, and the context does not.
            record._call_end_callbacks_on_future(over)
        work.get_future().add_done_callback(lambda _: _end(over))
        return work

    return shown


def _end(over: Future[None]) -> None:
    """Ends an event by another thread, and waits for that.

    Collectives overlap, and need not end in the order in which they began. Profiles show so of
    events that begin and end in two threads alone.
    """
    _ender().submit(over.set_result, None).result()


@cache
def _ender() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "star profile")
