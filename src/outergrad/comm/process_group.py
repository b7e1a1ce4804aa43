"""The process groups of torch.distributed as a transport."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from outergrad.comm.torch import TorchComm
from outergrad.core.transport import Comm, Transport


class TorchDistributed(Transport):
    """The process groups of torch.distributed: the transport that is used unless another is given.

    `timeout` is for one message; None for the timeout of the group. A group around a hub (backend
    "outergrad") of all its sites has a transport of its own, `og.Star`, which is used then.
    """

    settings = frozenset({"group", "timeout"})

    def open(
        self,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> Comm:
        """Returns the collectives over a process group, the default group if None.

        Raises:
            RuntimeError: there is no process group.
        """
        group = _default() if group is None else group
        own: Transport | None = getattr(group, "transport", None)
        if own is not None:
            return own.open(device, timeout=timeout)
        return TorchComm(group, device, timeout)


def _default() -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group('gloo') first, in a "
            "program started by torchrun, or pass group="
        )
    default = dist.group.WORLD
    assert default is not None
    return default
