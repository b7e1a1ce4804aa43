"""Base of peers whose sites step by themselves, and exchange how their weights have changed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from outergrad_lab.peers.peer import OptimizerPeer


class LocalStepsPeer(OptimizerPeer):
    """Exchanges after every H steps of each site's own optimizer.

    Args:
        every: H.
        model: Model that is trained.
        group: Process group of the sites; the default group if None.

    Attributes:
        shared: The weights of the last exchange by name, which are in the memory, too.
    """

    def __init__(self, every: int, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__(model, group)
        self._every = every
        self.shared = self.remember("shared")

    def exchange(self) -> None:
        """Makes the weights of all sites equal; a peer overrides it."""

    def share_gradients(self, lr: float) -> None:
        """Leaves gradients alone; before the first step it keeps the weights that all have."""
        if self.steps == 0:
            for name, p in self.params.items():
                self.shared[name].copy_(p)

    def share_weights(self) -> None:
        """Exchanges after every H steps."""
        if self.steps % self._every == 0:
            self.exchange()

    @torch.no_grad()
    def flush(self) -> None:
        """Exchanges the steps since the last exchange, if there are any."""
        if self.steps % self._every:
            self.exchange()
