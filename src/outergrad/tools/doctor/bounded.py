"""Work that may hang, with a limit."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_NAME = "bounded"


def bounded(work: Callable[[], T], limit_s: float) -> T:
    """Does some work in a thread of its own, and waits no longer than a limit.

    PyTorch's stores and gloo can hang beyond their own timeouts where a peer is stopped, and
    Ctrl-C would not end them.

    Raises:
        TimeoutError: It is not done; the thread is left to itself, and ends with the process.
    """
    result: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True, name=_NAME)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not result:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return result[0]


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Lets a program end though some work still hangs.

    Python's own shutdown would abort the process if a thread were inside PyTorch then.
    """
    try:
        yield
    except SystemExit as leaving:
        if any(thread.name == _NAME for thread in threading.enumerate()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(leaving.code or 0))
        raise
