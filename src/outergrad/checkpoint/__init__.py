"""Checkpoints of a training: files of every site, or torch.distributed.checkpoint."""

from outergrad.checkpoint.checkpoints import Checkpoints
from outergrad.checkpoint.dcp import DCPState
from outergrad.checkpoint.restored import Restored

__all__ = ["Checkpoints", "DCPState", "Restored"]
