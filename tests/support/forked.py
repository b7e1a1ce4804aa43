"""Processes that are forked off one that has imported PyTorch, which takes each of them seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import SimpleNamespace

import pytest

from outergrad.launch import processes

IMPORTED = ["torch", "torch._dynamo", "torch.distributed.checkpoint", "outergrad"]
"""By the one that is forked; an optimizer's first step imports the second."""


class _Forked(ForkServerProcess):
    """Has the environment of whoever starts it, not that of the first one ever started."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self):
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Forked


@contextmanager
def forked_processes() -> Iterator[None]:
    """Inside, `run_processes` forks; what it has to do with processes stays as it is."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    context = SimpleNamespace(get_context=lambda method: _Context())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "multiprocessing", context)
        yield
