"""Products of float32 in float32, whatever a training has chosen for its own."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch


class full_precision:  # noqa: N801 - used as a function
    """Inside, neither autocast nor TF32 rounds the factors of products.

    A backward that runs within `torch.autocast` would have products of rows in bfloat16, and
    `torch.set_float32_matmul_precision("high")` those on a GPU in TF32: sums of clipped gradients
    would be longer than their norms say. It is entered for every layer, so it is a plain class.
    """

    def __init__(self, device: torch.device) -> None:
        enabled = torch.is_autocast_enabled(device.type)
        self._off = torch.autocast(device.type, enabled=False) if enabled else None

    def __enter__(self) -> None:
        if self._off is not None:
            self._off.__enter__()
        _HIGHEST.__enter__()

    def __exit__(self, *raised: Any) -> None:
        _HIGHEST.__exit__(*raised)
        if self._off is not None:
            self._off.__exit__(*raised)


class _Highest:
    """The highest precision of products while some thread is inside; then that of before."""

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._restore: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._restore = _raised()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._restore is not None:
                self._restore()
                self._restore = None


_HIGHEST = _Highest()


def _raised() -> Callable[[], None] | None:
    """Sets the highest precision; returns what sets the one of before, None if that was it."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was chosen by backend, which PyTorch does not mix with this function
        return _raised_by_backend()
    if before == "highest":
        return None
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)


def _raised_by_backend() -> Callable[[], None]:
    mkldnn: Any = torch.backends.mkldnn
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]

    def restore() -> None:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision

    for backend in backends:
        backend.fp32_precision = "ieee"
    return restore
