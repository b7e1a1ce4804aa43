"""Processes that are forked off one that has imported PyTorch, which takes each of them seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from outergrad.launch import processes

IMPORTED = ["torch", "torch._dynamo", "torch.distributed.checkpoint", "outergrad"]
"""By the one that is forked; an optimizer's first step imports the second."""


class _Forked(ForkServerProcess):
    """Has the environment of whoever starts it, not that of the first one ever started."""

    shown: Path | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._environment, self._shown = dict(os.environ), self.shown

    def run(self):
        os.environ.clear()
        os.environ.update(self._environment)
        if self._shown is not None:
            os.dup2(os.open(self._shown, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        super().run()


class _Context(ForkServerContext):
    Process = _Forked


@contextmanager
def forked_processes(shown: Path | None = None) -> Iterator[None]:
    """Inside, `run_processes` forks; what it has to do with processes stays as it is.

    Args:
        shown: a file for what the processes print; None for where the first one ever printed.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    context = SimpleNamespace(get_context=lambda method: _Context())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "multiprocessing", context)
        patch.setattr(_Forked, "shown", shown)
        yield
