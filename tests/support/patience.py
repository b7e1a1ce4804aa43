"""Sessions that lose a site soon, but not while they begin."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

import outergrad as og


def distribute_then_hurry(
    model: nn.Module, method: Any = None, *, group: dist.ProcessGroup, patience_s: float = 1.0
) -> og.Session:
    """Returns a session that waits this long for a message, from its first step on.

    On a machine that does much else a second may pass before all sites have begun.
    """
    session = og.distribute(model, method, group=group, timeout=20.0)
    comm: Any = session._at.comm
    comm.patience_s, comm.pace.timeout = patience_s, timedelta(seconds=patience_s)
    return session
