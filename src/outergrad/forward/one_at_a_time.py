"""Forward differentiation in one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_LOCK = threading.Lock()
"""PyTorch numbers the levels of forward differentiation per process: two threads mix them up."""


def differentiated(work: Callable[[], T]) -> T:
    """Returns what work returns, called without autograd while no other thread is in here."""
    with _LOCK, torch.no_grad():
        return work()
