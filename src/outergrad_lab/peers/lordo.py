"""LoRDO: local steps of Adam in a subspace that follows from how the shared weights moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.methods.common import Settings, require
from outergrad_lab.peers.local_steps import LocalStepsPeer
from outergrad_lab.peers.muon_steps import hidden_weights, wide


@dataclass(frozen=True, kw_only=True, repr=False)
class LoRDO(Settings):
    """Local steps of Adam with moments of low rank, and averages of weights and moments.

    For each matrix θ (O, I), transposed if O is above I, with G this site's gradient, in each step:

        ĝ ← Qᵀ (G + E)
        E ← G + E - Q ĝ
        u ← β₁ u + (1 - β₁) ĝ
        v ← β₂ v + (1 - β₂) ĝ²
        θ ← θ - η ((1 - ω) G / (s (√v' + ε)) + ω Q u / (√v + ε))

    and after every H steps, with Δ the mean of the sites' changes of weights since the last time:

        θ, u, v ← mean of the sites'
        Q ← first R left singular vectors of Δ

    Matrices are those of `outergrad.optim.Muon`. Embeddings, the head and vectors take steps of the
    loop's optimizer, at each site, and are averaged with the others.

    Source: Jovanović et al., LoRDO, arXiv 2602.04396. As published: the formula, in its form with a
    quasi-hyperbolic term of full rank, (1 - ω) G, without which all weights would stay in one
    subspace. We know the formula and the abstract alone, and chose all else. As printed, G (O, I)
    and v (R, I) do not fit: v' is the mean of v over its R rows. Adam's correction of u and v for
    their start at zero. The moments are averaged as often as the weights. They are turned into the
    new subspace, u by T = Q_newᵀ Q, v by the squares of T's entries; E stays. The first Q is
    random. All defaults. Clipping, which the paper has before the projection, is left to the
    training loop. θ travels whole, since Δ has full rank.

    Compare with it where sites may step by themselves and memory counts: moments take R rows, not
    O, but E takes O. Bytes per exchange are those of DDP and of u and v.

    Attributes:
        every: H, steps between two exchanges.
        rank: R; smaller matrices have as many as they can.
        omega: ω, share of the step in the subspace.
        scale: s, what the step of full rank is divided by.
        beta1: β₁.
        beta2: β₂.
        eps: ε.
        seed: Seed of the first Q.
    """

    every: int = 30
    rank: int = 16
    omega: float = 0.9
    scale: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.omega <= 1, self, "omega", "a number from 0 to 1")
        for name in ("scale", "eps"):
            require(getattr(self, name) > 0, self, name, "more than 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, self, name, "0 or more and below 1")
        require(self.seed >= 0, self, "seed", "0 or more")

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> LoRDOPeer:
        """Attaches the method to a model."""
        return LoRDOPeer(self, model, group)


class LoRDOPeer(LocalStepsPeer):
    """LoRDO on one site.

    Its memory is `shared`, the weights of the last exchange, of every parameter, and of each hidden
    weight as a matrix of no more rows than columns: `error` E (O, I), `basis` Q (O, R), and the
    moments `first` u and `second` v (R, I).
    """

    def __init__(self, settings: LoRDO, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__(settings.every, model, group)
        self._settings = settings
        hidden = {n: wide(self.params[n].detach()) for n in hidden_weights(model)}
        generator = torch.Generator().manual_seed(settings.seed)
        self._basis = {n: _random_basis(p, settings.rank, generator) for n, p in hidden.items()}
        self._error = {n: torch.zeros_like(p) for n, p in hidden.items()}
        self._first, self._second = (
            {n: p.new_zeros(self._basis[n].shape[1], p.shape[1]) for n, p in hidden.items()}
            for _ in range(2)
        )
        own = {"error": self._error, "basis": self._basis}
        self.memory |= {**own, "first": self._first, "second": self._second}

    def share_gradients(self, lr: float) -> None:
        """Moves the hidden weights of this site; without a gradient the optimizer skips them."""
        super().share_gradients(lr)
        for name in self._basis:
            gradient = wide(self.gradient(name))
            self._follow(name, gradient)
            wide(self.params[name]).sub_(self._step(name, gradient), alpha=lr)
            self.params[name].grad = None

    def exchange(self) -> None:
        """Averages weights and moments, and turns to the subspace of the mean change."""
        own = [*self.params.values(), *self._first.values(), *self._second.values()]
        before = {name: wide(self.shared[name]).clone() for name in self._basis}
        for x, mean in zip(own, self.sites.mean(own), strict=True):
            x.copy_(mean)
        for name, p in self.params.items():
            self.shared[name].copy_(p)
        for name, last in before.items():
            self._turn(name, last - wide(self.shared[name]))

    def _follow(self, name: str, gradient: Tensor) -> None:
        """Brings the gradient into the moments; the error feedback keeps what they lack of it."""
        settings, q, error = self._settings, self._basis[name], self._error[name]
        projected = q.T @ error.add_(gradient)
        error.sub_(q @ projected)
        self._first[name].lerp_(projected, 1 - settings.beta1)
        self._second[name].lerp_(projected.square(), 1 - settings.beta2)

    def _step(self, name: str, gradient: Tensor) -> Tensor:
        """Returns the step of a hidden weight at a learning rate of 1."""
        settings, age = self._settings, self.steps + 1
        first = self._first[name] / (1 - settings.beta1**age)
        second = self._second[name] / (1 - settings.beta2**age)
        whole = gradient / (settings.scale * (second.mean(0).sqrt() + settings.eps))
        inside = self._basis[name] @ (first / (second.sqrt() + settings.eps))
        return (1 - settings.omega) * whole + settings.omega * inside

    def _turn(self, name: str, change: Tensor) -> None:
        """Sets Q, and turns the moments into its subspace."""
        basis = self._basis[name]
        new = torch.linalg.svd(change, full_matrices=False).U[:, : basis.shape[1]]
        turn = new.T @ basis
        self._first[name].copy_(turn @ self._first[name])
        self._second[name].copy_(turn.square() @ self._second[name])
        basis.copy_(new)


def _random_basis(matrix: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """Returns orthonormal columns, no more than the matrix has rows."""
    columns = min(rank, *matrix.shape)
    drawn = torch.randn(matrix.shape[0], columns, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn).Q.to(matrix)
