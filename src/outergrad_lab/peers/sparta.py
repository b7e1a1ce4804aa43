"""SPARTA: in every step a few randomly drawn weights are replaced by their mean over the sites."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.methods.common import Settings, require
from outergrad_lab.peers.peer import OptimizerPeer


@dataclass(frozen=True, kw_only=True, repr=False)
class SPARTA(Settings):
    """Sites step by themselves; after each step a random share of the weights is averaged.

        S ← every weight with probability p, the same at all sites, drawn anew
        θ[S] ← mean of the sites' θ[S]

    Source: the formula of exo-explore/gym; there is no paper of it that we follow. As there:
    p = 0.5%, and any inner optimizer. Ours: the drawn weights of all parameters travel in one
    all-reduce, and the draw follows from `seed` and the step, so that no index travels. Sites keep
    weights that differ; they are not averaged at the end.

    Compare with it where sites may differ, at the same share of DDP's bytes as p.

    Attributes:
        share: p.
        seed: Seed of the draws.
    """

    share: float = 0.005
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.share <= 1, self, "share", "above 0, at most 1")
        require(self.seed >= 0, self, "seed", "0 or more")

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> SPARTAPeer:
        """Attaches the method to a model."""
        return SPARTAPeer(self, model, group)


class SPARTAPeer(OptimizerPeer):
    """SPARTA on one site; its only state is the number of steps."""

    def __init__(self, settings: SPARTA, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__(model, group)
        self._settings = settings

    def share_weights(self) -> None:
        """Averages the weights that are drawn in this step."""
        drawn = self.drawn(self.steps)
        own = [p[mask] for p, mask in zip(self.params.values(), drawn, strict=True)]
        for p, mask, mean in zip(self.params.values(), drawn, self.sites.mean(own), strict=True):
            p[mask] = mean

    def drawn(self, step: int) -> list[Tensor]:
        """Returns a mask per parameter of the weights averaged after a step, counted from 1."""
        generator = torch.Generator().manual_seed(self._settings.seed + step)
        share = self._settings.share
        return [torch.rand(p.shape, generator=generator) < share for p in self.params.values()]
