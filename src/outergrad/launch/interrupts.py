"""Signals that raise an error where Python would not lose it."""

from __future__ import annotations

import gc
import signal
from threading import Event, Thread, main_thread
from types import FrameType

_AGAIN_S = 0.01
_SENT_AGAIN: dict[int, Event] = {}
"""Events by signal, each set once the handler of the signal has been called again."""


def not_lost() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt in the main thread wherever it comes.

    Python calls the handler of a signal in whatever code runs. Sessions let go of nodes in a
    callback of the garbage collector, and Python prints an error in a callback and goes on.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda n, frame: raise_in(frame, n, KeyboardInterrupt()))


def raise_in(frame: FrameType | None, number: int, error: BaseException) -> None:
    """Raises an error in the frame that a signal interrupts, or soon after it.

    Args:
        frame: What the signal's handler is called with.
        number: Number of the signal, which comes again behind a callback of the collector.
        error: The error.
    """
    if (came := _SENT_AGAIN.pop(number, None)) is not None:
        came.set()
    if not _is_in_collection(frame):
        raise error
    _SENT_AGAIN[number] = came = Event()
    Thread(target=_send_again, args=(number, came), daemon=True).start()


def _send_again(number: int, came: Event) -> None:
    """Sends a signal to the main thread until it takes it.

    One that reaches a thread just before it begins to wait does not end that wait.
    """
    main = main_thread().ident
    while main is not None and not came.wait(_AGAIN_S):
        signal.pthread_kill(main, number)


def _is_in_collection(frame: FrameType | None) -> bool:
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in callbacks:
        frame = frame.f_back
    return frame is not None
