"""Keeps PyTorch's libraries from the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def quiet_libraries() -> Iterator[TextIO]:
    """Yields the error stream, on which only this program writes then.

    Where a connection fails, PyTorch's libraries write a page of their stack to it; the report
    says the same in a sentence.
    """
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "w") as terminal, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield terminal
        finally:
            os.dup2(terminal.fileno(), 2)
