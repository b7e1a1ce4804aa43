"""What a process group moves tensors with."""

from __future__ import annotations

import torch
import torch.distributed as dist


def has_backend(group: dist.ProcessGroup, device: str) -> bool:
    """Whether the group moves tensors of this type of device; gloo stages CUDA through host."""
    try:
        name = group._get_backend(torch.device(device)).name().lower()
    except RuntimeError:
        return False
    return device == "cpu" or name != "gloo"
