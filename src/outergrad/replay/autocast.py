"""Whether a forward ran under autocast, to be computed again so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def autocast_now(device: torch.device) -> str | None:
    """The name of the dtype that products are computed in now; None without autocast."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


@contextmanager
def autocast_as(name: str | None, device: torch.device) -> Iterator[None]:
    """Computes as `autocast_now` said."""
    dtype = None if name is None else getattr(torch, name)
    with torch.autocast(device.type, dtype=dtype, enabled=name is not None, cache_enabled=False):
        yield
