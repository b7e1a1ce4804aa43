"""ACP-SGD: the two factors of PowerSGD alternate, so that a step has one all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.methods.common import Settings
from outergrad_lab.peers.peer import OptimizerPeer


@dataclass(frozen=True, kw_only=True, repr=False)
class ACPSGD(Settings):
    """PowerSGD that computes one of its factors per step, from the other one of the last step.

    For each weight as a matrix G of its first dimension by all others, with error feedback E:

        in odd steps                      in even steps
        Q ← orth(Q)                       P ← orth(P)
        P ← (G + E) Q                     Q ← (G + E)ᵀ P
        E ← G + E - P Qᵀ                  E ← G + E - P Qᵀ
        P ← mean of the sites' P          Q ← mean of the sites' Q
        G ← P Qᵀ                          G ← P Qᵀ

    Source: Zhang, Zhang, Shi, Chu and Li, Evaluation and Optimization of Gradient Compression for
    Distributed Deep Learning, 2023. As published: the alternation, one all-reduce per step, error
    feedback. E uses this site's own factor, before the mean. Ours: vectors, and weights no larger
    than both factors together, travel whole in the same all-reduce, which is one message after the
    backward. The optimizer is the loop's.

    Compare with it where latency counts: it halves PowerSGD's messages and bytes per step.

    Attributes:
        rank: R, rank of the factors.
        seed: Seed of the first Q.
    """

    rank: int = 4
    seed: int = 0

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> ACPSGDPeer:
        """Attaches the method to a model."""
        return ACPSGDPeer(self, model, group)


class ACPSGDPeer(OptimizerPeer):
    """ACP-SGD on one site.

    Its memory holds, for every weight (O, I) at low rank, `error` E (O, I), `left` P (O, R) and
    `right` Q (I, R).
    """

    def __init__(self, settings: ACPSGD, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__(model, group)
        rank, generator = settings.rank, torch.Generator().manual_seed(settings.seed)
        matrices = {name: p for name, p in self.params.items() if low_rank_pays(p, rank)}
        sides = {name: p.flatten(1).shape for name, p in matrices.items()}
        self._error = {n: torch.zeros_like(p.flatten(1)).detach() for n, p in matrices.items()}
        self._left = {n: matrices[n].new_zeros(rows, rank) for n, (rows, _) in sides.items()}
        self._right = {
            n: torch.randn(columns, rank, generator=generator).to(matrices[n])
            for n, (_, columns) in sides.items()
        }
        self.memory = {"error": self._error, "left": self._left, "right": self._right}

    def share_gradients(self, lr: float) -> None:
        """Replaces every gradient by the mean over the sites, of weights at low rank."""
        even = self.steps % 2 == 1
        own = [self._compressed(name, even) for name in self._error]
        whole = [name for name in self.params if name not in self._error]
        means = self.sites.mean([*own, *(self.gradient(name) for name in whole)])
        for name, mean in zip([*self._error, *whole], means, strict=True):
            if name in self._error:
                (self._right if even else self._left)[name].copy_(mean)
                mean = self._left[name] @ self._right[name].T
            self.params[name].grad = mean.view(self.params[name].shape)

    def _compressed(self, name: str, even: bool) -> Tensor:
        """Returns this site's factor; the error feedback keeps what it lacks of the gradient."""
        total = self._error[name].add_(self.gradient(name).flatten(1))
        fixed = (self._left if even else self._right)[name]
        fixed.copy_(torch.linalg.qr(fixed).Q)
        factor = (total.T if even else total) @ fixed
        total.sub_(fixed @ factor.T if even else factor @ fixed.T)
        return factor


def low_rank_pays(p: Tensor, rank: int) -> bool:
    """True if both factors of a weight together are smaller than the weight."""
    if p.dim() < 2:
        return False
    rows, columns = p.flatten(1).shape
    return rank * (rows + columns) < rows * columns
