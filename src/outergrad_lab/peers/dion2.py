"""Dion2: Muon's step of a share of each matrix's rows, whose momentum alone travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.methods.common import Settings, require
from outergrad.optim import newton_schulz
from outergrad_lab.peers.muon_steps import hidden_weights, muon_scale, wide
from outergrad_lab.peers.peer import OptimizerPeer


@dataclass(frozen=True, kw_only=True, repr=False)
class Dion2(Settings):
    """An optimizer of matrices, of whose momentum a share of the rows travels.

    For each matrix θ (O, I), transposed if O is above I, with G this site's gradient:

        M ← M + G
        S ← a share α of the rows, the same at all sites
        X ← orth(mean of the sites' M[S])
        M[S] ← μ M[S]
        θ ← (1 - η λ) θ
        θ[S] ← θ[S] - η 0.2 √max(O, I) X

    Matrices are those of `outergrad.optim.Muon`, kernels of convolutions among them. Embeddings,
    the head and vectors are left to the loop's optimizer, with gradients averaged whole.

    Source: Ahn et al., Dion2, arXiv 2512.16928. As published: the formula, α, μ and λ, with an M of
    the averaged gradient. Ours: M is local to each site, so that only M[S] travels, in one
    all-reduce with all that is averaged whole; rows that are not drawn are the error feedback, at
    the site. S is drawn at random from `seed` and the step, so that no index travels. With
    `rows="norm"`, as in the paper's code, S has the rows of the largest sums, over the sites, of
    absolute values in M: a number per row travels in an all-reduce before. η is the loop's rate,
    which is why the step has Muon's scale 0.2 √max(O, I) in place of √(O / I).

    Compare with it where the optimizer may be changed: bytes are the share α of DDP's.

    Attributes:
        alpha: α; 0.25 is recommended, 0.5 for small models.
        rows: The choice of S: "random" or "norm".
        mu: μ, share of the rows sent that stays in the momentum.
        weight_decay: λ of the matrices.
        seed: Seed of the draws.
    """

    alpha: float = 0.25
    rows: str = "random"
    mu: float = 0.95
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.alpha <= 1, self, "alpha", "above 0, at most 1")
        require(self.rows in ("random", "norm"), self, "rows", "random or norm")
        require(0 <= self.mu < 1, self, "mu", "0 or more and below 1")
        require(self.weight_decay >= 0, self, "weight_decay", "0 or more")
        require(self.seed >= 0, self, "seed", "0 or more")

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> Dion2Peer:
        """Attaches the method to a model."""
        return Dion2Peer(self, model, group)


class Dion2Peer(OptimizerPeer):
    """Dion2 on one site.

    Its memory is `momentum`, M of every hidden weight, in the weight's shape.
    """

    def __init__(self, settings: Dion2, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__(model, group)
        self._settings = settings
        names = hidden_weights(model)
        self._momentum = {n: torch.zeros_like(self.params[n]).detach() for n in names}
        self.memory = {"momentum": self._momentum}

    def share_gradients(self, lr: float) -> None:
        """Moves the hidden weights, and sets the mean gradients of all other parameters."""
        for name, m in self._momentum.items():
            m.add_(self.gradient(name))
        rows = self.chosen()
        own = [wide(m).index_select(0, rows[name]) for name, m in self._momentum.items()]
        rest = [name for name in self.params if name not in self._momentum]
        means = self.sites.mean([*own, *map(self.gradient, rest)])
        for name, sent, mean in zip(rows, own, means, strict=False):
            wide(self._momentum[name]).index_copy_(0, rows[name], self._settings.mu * sent)
            self._move(name, rows[name], mean, lr)
        for name, mean in zip(rest, means[len(own) :], strict=True):
            self.params[name].grad = mean

    def chosen(self) -> dict[str, Tensor]:
        """Returns S of every hidden weight in the coming step; by norm, all sites must call it."""
        matrices = {name: wide(m) for name, m in self._momentum.items()}
        by_norm = self._settings.rows == "norm"
        weights = self._norms(matrices) if by_norm else self._drawn(matrices)
        counts = {n: max(1, round(self._settings.alpha * len(w))) for n, w in weights.items()}
        return {n: w.topk(counts[n]).indices.sort().values for n, w in weights.items()}

    def _norms(self, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
        means = self.sites.mean([m.abs().sum(1) for m in matrices.values()])
        return dict(zip(matrices, means, strict=True))

    def _drawn(self, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._settings.seed + self.steps)
        return {
            n: torch.rand(len(m), generator=generator, dtype=torch.float64).to(m.device)
            for n, m in matrices.items()
        }

    def _move(self, name: str, rows: Tensor, mean: Tensor, lr: float) -> None:
        """Applies the step of a weight; without a gradient the optimizer skips it."""
        p = self.params[name]
        p.mul_(1 - lr * self._settings.weight_decay)
        wide(p).index_add_(0, rows, newton_schulz(mean), alpha=-lr * muon_scale(p.shape))
        p.grad = None
