"""MuLoCo: local steps, their changes in two bits with error feedback, an outer momentum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.methods.common import Settings, require
from outergrad_lab.peers.binned_means import BinnedMeans
from outergrad_lab.peers.bins import Binned, binned
from outergrad_lab.peers.local_steps import LocalStepsPeer


@dataclass(frozen=True, kw_only=True, repr=False)
class MuLoCo(Settings):
    """DiLoCo with Muon inside, whose changes of weights travel in few bits.

    After every H steps of each site's own optimizer, with θ the weights after these steps and θ'
    those of the last exchange:

        e ← β e + θ' - θ
        q ← C(e)
        e ← e - q
        Ψ ← C(mean of the sites' q)
        u ← μ u + η Ψ
        θ, θ' ← θ' - μ u - η Ψ

    C sorts the numbers of a tensor into 2^bits bins of equal width, over six standard deviations
    around their mean, and decodes each as the mean of its bin (`bins`).

    Source: Thérien et al., MuLoCo, arXiv 2505.23725, version 2. As published: the formula, two
    roundings, one before the sum and one after it, and vectors (of norms) that travel whole. Ours:
    a site adds up a piece of each tensor and rounds it around the mean of this piece, and nobody
    owes what that drops. Matrices of embeddings are rounded as any other. The inner optimizer is
    the loop's, which is to be Muon; the paper has a momentum of 0.9 without Nesterov in it.

    For η and μ the paper has 0.7 and 0.6 at one site, 0.9 and 0.8 at eight, 1 and 0.9 at sixteen.
    With `bits=32` nothing is rounded or owed: `local-steps:k=30:lr=0.7:momentum=0.6`.

    Compare with it where sites may step by themselves, and the optimizer may be Muon.

    Attributes:
        every: H, steps between two exchanges.
        bits: Bits of a number: 2, 4, 8, or 32 for no rounding.
        lr: η, the outer learning rate.
        momentum: μ, of the outer Nesterov momentum.
        beta: β, share of the error that stays.
    """

    every: int = 30
    bits: int = 2
    lr: float = 0.7
    momentum: float = 0.6
    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in (2, 4, 8, 32), self, "bits", "2, 4, 8 or 32")
        require(self.lr > 0, self, "lr", "more than 0")
        require(0 <= self.momentum < 1, self, "momentum", "0 or more and below 1")
        require(0 <= self.beta <= 1, self, "beta", "a number from 0 to 1")

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> MuLoCoPeer:
        """Attaches the method to a model."""
        return MuLoCoPeer(self, model, group)


class MuLoCoPeer(LocalStepsPeer):
    """MuLoCo on one site.

    Its memory is `shared`, θ', and `velocity`, u, of every parameter, and `error`, e, of those that
    are rounded, in the parameter's shape.
    """

    def __init__(self, settings: MuLoCo, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__(settings.every, model, group)
        self._settings = settings
        self._velocity = self.remember("velocity")
        rounded = [n for n, p in self.params.items() if p.dim() > 1 and settings.bits < 32]
        self._error = {n: torch.zeros_like(self.params[n]).detach() for n in rounded}
        self.memory["error"] = self._error
        self._means = BinnedMeans(self.sites, settings.bits, list(self._error.values()))

    def exchange(self) -> None:
        """Moves the weights of the last exchange by the mean change since then."""
        settings = self._settings
        for name, mean in self._mean_changes().items():
            velocity, shared = self._velocity[name], self.shared[name]
            velocity.mul_(settings.momentum).add_(mean, alpha=settings.lr)
            shared.sub_(velocity, alpha=settings.momentum).sub_(mean, alpha=settings.lr)
            self.params[name].copy_(shared)

    def _mean_changes(self) -> dict[str, Tensor]:
        """Returns Ψ of every parameter."""
        change = {name: self.shared[name] - p for name, p in self.params.items()}
        whole = [name for name in self.params if name not in self._error]
        means = dict(zip(whole, self.sites.mean([change[n] for n in whole]), strict=True))
        own = [self._rounded(name, change[name]) for name in self._error]
        return means | dict(zip(self._error, self._means.mean(own), strict=True))

    def _rounded(self, name: str, change: Tensor) -> Binned:
        """Returns q; the error feedback keeps what it lacks of the change."""
        owed = self._error[name].mul_(self._settings.beta).add_(change)
        q = binned(owed, self._settings.bits)
        owed.sub_(q.values(owed.dtype).view(owed.shape))
        return q
