"""Checkpoints of a training: files of every site, or torch.distributed.checkpoint."""

from outergrad.checkpoint.cast import Restored
from outergrad.checkpoint.checkpoints import Checkpoints
from outergrad.checkpoint.dcp import DCPState

__all__ = ["Checkpoints", "DCPState", "Restored"]
