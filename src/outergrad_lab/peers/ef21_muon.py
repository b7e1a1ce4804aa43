"""EF21-Muon: sites send how their momentum differs from what the others know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.methods.common import Settings, require
from outergrad_lab.peers.compressors import Compressor, LargestEntries, LowRank
from outergrad_lab.peers.muon_steps import hidden_weights, muon_step
from outergrad_lab.peers.packing import VALUES
from outergrad_lab.peers.peer import OptimizerPeer


@dataclass(frozen=True, kw_only=True, repr=False)
class EF21Muon(Settings):
    """An optimizer of matrices, whose sites correct what all know of their momenta.

    For each matrix θ (O, I), with g this site's gradient:

        M ← (1 - β) M + β g
        R ← C(M - K)
        K ← K + R
        G ← G + mean of the sites' R
        θ ← (1 - η λ) θ - η 0.2 √max(O, I) orth(G)

    Matrices are those of `outergrad.optim.Muon`, kernels of convolutions among them. Embeddings,
    the head and vectors are left to the loop's optimizer, with gradients averaged whole.

    Source: Gruntkowska et al., EF21-Muon, arXiv 2510.00643, whose G of a site is K here. As
    published: the formula, with one orth, after the mean. C is, with `compressor="top-k"`, the
    entries of largest magnitude of each chunk, places packed in the bits that they need; with
    "rank", a projection on the first singular vectors by two steps of a power iteration. Ours: R is
    gathered, so that every site knows G, and no server sends changes of weights, which the paper
    compresses, too. K and G begin at zero. β is what goes with Muon's momentum of 0.95. η is the
    loop's rate.

    Compare with it where the optimizer may be changed, and every step is shared.

    Attributes:
        compressor: C: "top-k" or "rank".
        entries: Of a chunk, for top-k.
        side: Largest length of a side of a chunk, for top-k.
        bits: Bits of an entry's value: 32, 8 or 2, for top-k.
        rank: Rank of what travels, for rank.
        beta: β, weight of the new gradient.
        weight_decay: λ of the matrices.
        seed: Seed of the vectors that the power iteration begins with, for rank.
    """

    compressor: str = "top-k"
    entries: int = 32
    side: int = 64
    bits: int = 8
    rank: int = 4
    beta: float = 0.05
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.compressor in ("top-k", "rank"), self, "compressor", "top-k or rank")
        for name in ("side", "entries"):
            require(getattr(self, name) >= 1, self, name, "1 or more")
        require(self.bits in VALUES, self, "bits", "32, 8 or 2")
        require(0 < self.beta <= 1, self, "beta", "above 0, at most 1")
        require(self.weight_decay >= 0, self, "weight_decay", "0 or more")
        require(self.seed >= 0, self, "seed", "0 or more")

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> EF21MuonPeer:
        """Attaches the method to a model."""
        return EF21MuonPeer(self, model, group)


class EF21MuonPeer(OptimizerPeer):
    """EF21-Muon on one site.

    Its memory holds, for every hidden weight in its shape, `momentum` M, `known` K and `mean` G.
    """

    def __init__(
        self, settings: EF21Muon, model: nn.Module, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(model, group)
        self._settings = settings
        hidden = {name: self.params[name].detach() for name in hidden_weights(model)}
        self._momentum, self._known, self._mean = (
            {name: torch.zeros_like(p) for name, p in hidden.items()} for _ in range(3)
        )
        self._compressor = _compressor(settings, hidden)
        self.memory = {"momentum": self._momentum, "known": self._known, "mean": self._mean}

    def share_gradients(self, lr: float) -> None:
        """Moves the hidden weights, and sets the mean gradients of all other parameters."""
        rest = [name for name in self.params if name not in self._momentum]
        for name, mean in zip(rest, self.sites.mean([*map(self.gradient, rest)]), strict=True):
            self.params[name].grad = mean
        if self._momentum:
            self._correct()
        for name, mean in self._mean.items():
            p = self.params[name]
            p.mul_(1 - lr * self._settings.weight_decay).sub_(muon_step(mean), alpha=lr)
            p.grad = None

    def _correct(self) -> None:
        """Brings K of this site, and with all others G, nearer to M and its mean."""
        for name, m in self._momentum.items():
            m.mul_(1 - self._settings.beta).add_(self.gradient(name), alpha=self._settings.beta)
        lack = {name: m - self._known[name] for name, m in self._momentum.items()}
        own = self._compressor.written(lack, self._settings.seed + self.steps)
        for name, r in self._compressor.read(own).items():
            self._known[name].add_(r)
        for content in self.sites.gather(own):
            for name, r in self._compressor.read(content).items():
                self._mean[name].add_(r, alpha=1 / self.sites.number)


def _compressor(settings: EF21Muon, hidden: dict[str, Tensor]) -> Compressor:
    if settings.compressor == "rank":
        return LowRank(hidden, settings.rank)
    return LargestEntries(hidden, settings.side, settings.entries, settings.bits)
