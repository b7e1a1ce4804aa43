"""Dion: orthonormal updates of low rank, from a momentum that is local to each site."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.methods.common import Settings, require
from outergrad_lab.peers.muon_steps import hidden_weights
from outergrad_lab.peers.peer import OptimizerPeer


def _of_length_one(r_IR: Tensor) -> Tensor:
    return r_IR / r_IR.norm(dim=0).clamp_min(torch.finfo(r_IR.dtype).tiny)


def _orthonormal(r_IR: Tensor) -> Tensor:
    q_IR, upper_RR = torch.linalg.qr(r_IR)
    # QR leaves the signs of columns open. Turned around, one would move weights uphill.
    return q_IR * torch.where(upper_RR.diagonal() < 0, -1, 1)


COLUMNS = {"length": _of_length_one, "qr": _orthonormal}
"""Ways from R to the next Q."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Dion(Settings):
    """An optimizer of matrices, of which only two factors travel.

    For each matrix θ (O, I), with G this site's gradient:

        M ← M + G
        P ← orth(mean of the sites' M Q)
        R ← mean of the sites' Mᵀ P
        M ← M - (1 - μ) P Rᵀ
        Q ← R, each column divided by its length
        θ ← θ - η (λ θ + √(O / I) P Qᵀ)

    Embeddings, the head (the last linear layer), vectors and kernels of convolutions are left to
    the loop's optimizer, with gradients averaged whole; it should be Adam or AdamW.

    Source: Ahn and Xu, Dion, arXiv 2504.05295, with a momentum local to each site. As published:
    the formula, QR, sizes. Ours: the first all-reduce holds M Q of all matrices and the gradients
    of other parameters, the second one Mᵀ P of all matrices; sharding within a site is left out.

    With `columns="qr"` it is Orth-Dion (arXiv 2605.16341): Q ← orth(R), so that the update has
    singular values of 1 also where columns of R point the same way. Ours: each column of Q points
    where that of R does, and M stays that of Dion; the paper may keep less of it.

    Compare with it where the optimizer may be changed: bytes are those of PowerSGD at that rank.

    Attributes:
        rank: R; the paper has 1/16 to 1/4 of the width. Smaller matrices have as many as they can.
        mu: μ, share of the applied update that stays in the momentum.
        lr: η of the matrices, which falls as the loop's does; that of the rest is the loop's.
        weight_decay: λ of the matrices.
        columns: Columns of Q: those of R by their "length", or its orthonormal ones, by "qr".
        seed: Seed of the first Q.
    """

    rank: int = 16
    mu: float = 0.95
    lr: float = 0.01
    weight_decay: float = 0.01
    columns: str = "length"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.mu < 1, self, "mu", "0 or more and below 1")
        require(self.lr > 0, self, "lr", "more than 0")
        require(self.weight_decay >= 0, self, "weight_decay", "0 or more")
        require(self.columns in COLUMNS, self, "columns", " or ".join(COLUMNS))

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> DionPeer:
        """Attaches the method to a model."""
        return DionPeer(self, model, group)


class DionPeer(OptimizerPeer):
    """Dion on one site.

    Its memory holds, for every matrix (O, I), `momentum` M (O, I) and `right` Q (I, R).
    """

    def __init__(self, settings: Dion, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__(model, group)
        self._settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        names = [n for n in hidden_weights(model) if self.params[n].dim() == 2]
        self._momentum = {n: torch.zeros_like(self.params[n]).detach() for n in names}
        self._right = {
            n: torch.randn(p.shape[1], min(settings.rank, *p.shape), generator=generator).to(p)
            for n, p in ((n, self.params[n].detach()) for n in names)
        }
        self.memory = {"momentum": self._momentum, "right": self._right}

    def share_gradients(self, lr: float) -> None:
        """Moves the matrices, and sets the mean gradients of all other parameters."""
        for name, m in self._momentum.items():
            m.add_(self.gradient(name))
        lefts = self._lefts()
        for name, p_OR, r_IR in zip(self._momentum, lefts, self._rights(lefts), strict=True):
            self._momentum[name].sub_(p_OR @ r_IR.T, alpha=1 - self._settings.mu)
            self._right[name].copy_(COLUMNS[self._settings.columns](r_IR))
            self._move(name, p_OR)

    def _lefts(self) -> list[Tensor]:
        """Returns P of every matrix, and sets the mean gradients of all other parameters."""
        rest = [name for name in self.params if name not in self._momentum]
        own = [m @ self._right[name] for name, m in self._momentum.items()]
        means = self.sites.mean([*own, *map(self.gradient, rest)])
        for name, mean in zip(rest, means[len(own) :], strict=True):
            self.params[name].grad = mean
        return [torch.linalg.qr(mean).Q for mean in means[: len(own)]]

    def _rights(self, lefts: list[Tensor]) -> list[Tensor]:
        momenta = zip(self._momentum.values(), lefts, strict=True)
        return self.sites.mean([m.T @ p_OR for m, p_OR in momenta])

    def _move(self, name: str, p_OR: Tensor) -> None:
        """Applies the update of a matrix; without a gradient the optimizer skips it."""
        p, settings = self.params[name], self._settings
        lr, scale = settings.lr * self.left_of_rate, (p.shape[0] / p.shape[1]) ** 0.5
        p.mul_(1 - lr * settings.weight_decay)
        p.sub_(p_OR @ self._right[name].T, alpha=lr * scale)
        p.grad = None
