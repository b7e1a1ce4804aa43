"""Recorders are told that a program ends, although nobody has detached its session."""

from __future__ import annotations

import atexit
import sys
from typing import Protocol
from weakref import ref


class Closable(Protocol):
    """What is closed when the program ends."""

    def close(self, error: str = "") -> None:
        """Ends it, with the type of the exception that ended the program, if one did."""
        ...


class Ending:
    """Closes something when the interpreter exits, unless it is gone or was closed before.

    Args:
        closable: not kept alive.
    """

    def __init__(self, closable: Closable) -> None:
        self._closable = ref(closable)
        self._expected = False

    def expect(self) -> None:
        """From now on there is something to close."""
        if not self._expected:
            self._expected = True
            atexit.register(self._exit)

    def cancel(self) -> None:
        """There is nothing to close any more."""
        self._expected = False
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        closable = self._closable()
        if closable is not None:
            closable.close(_uncaught())


def _uncaught() -> str:
    """The type of the exception that ends the program; Python keeps it for a debugger."""
    kind = getattr(sys, "last_type", None)
    at_prompt = hasattr(sys, "ps1")  # where an error ends nothing
    return "" if kind is None or at_prompt else kind.__name__
