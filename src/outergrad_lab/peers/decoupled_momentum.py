"""DeMo: the fast part of each site's momentum travels, as few entries of its cosine transform."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.methods.common import Settings, require
from outergrad_lab.peers.muon_steps import hidden_weights, muon_step
from outergrad_lab.peers.packing import VALUES, Entries, Message, mean_of
from outergrad_lab.peers.peer import OptimizerPeer


@dataclass(frozen=True, kw_only=True, repr=False)
class DeMo(Settings):
    """An optimizer whose momentum is local to each site, except for what it sends.

    Per weight, in chunks of at most 64 x 64, with g this site's gradient:

        m ← β m + η g
        q ← the K entries of largest magnitude of each chunk of DCT(m)
        m ← m - α IDCT(q)
        θ ← θ - η sign(IDCT(mean of the sites' q))

    Source: Peng, Quesnelle and Kingma, DeMo: Decoupled Momentum Optimization, arXiv 2411.19870,
    algorithm 1, with α = 1. The mean is over all sites, those that did not send an entry too. The
    revision of 2026 recommends α = 0.2 (both 0 and 1 are worse) and β from 0.995 to 0.999, and has
    other updates of what arrives, u = IDCT(mean of q): u itself, and orth(u).

    As published: the formula, the sizes, two all-gathers per parameter, of indices in int64 and of
    values as they are, 12 bytes per entry in float32. Differences: `bucket=True` is one all-gather
    of all parameters, indices in 12 bits. With `bits=8` m keeps what the rounding of the values
    lost. Weights of more than two dimensions, which DeMo does not know, are cut as matrices of
    their first dimension by all others. Clipping and warm-up, which the paper recommends, are left
    to the training loop. The learning rate η is that of the loop's optimizer, which has nothing
    else to do. With `sign=False` that optimizer moves the weights: IDCT(mean of q) / η is its
    gradient, zero where η is.

    Compare with it where every step is shared and bytes count: it claims 85 times fewer than DDP.

    Attributes:
        beta: β, share of the momentum that stays.
        alpha: α, share of what was sent that is taken out of the momentum.
        side: Largest length of a side of a chunk.
        entries: K, entries of a chunk.
        bucket: Whether all parameters travel in one message.
        bits: Bits of a value in the bucket: 32, 8 or 2.
        sign: Whether it moves the weights itself.
        update: Step that follows from u, where it does: "sign", "identity" or "orth".
    """

    beta: float = 0.999
    alpha: float = 1.0
    side: int = 64
    entries: int = 32
    bucket: bool = False
    bits: int = 32
    sign: bool = True
    update: str = "sign"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.beta < 1, self, "beta", "0 or more and below 1")
        require(0 <= self.alpha <= 1, self, "alpha", "a number from 0 to 1")
        for name in ("side", "entries"):
            require(getattr(self, name) >= 1, self, name, "1 or more")
        require(self.bits in VALUES, self, "bits", "32, 8 or 2")
        require(self.bits == 32 or self.bucket, self, "bits", "32, or bucket=True with it")
        require(
            self.update in ("sign", "identity", "orth"), self, "update", "sign, identity or orth"
        )
        alone = self.update == "sign" or self.sign
        require(alone, self, "update", "sign, or leave out sign=False: the optimizer moves there")

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> DeMoPeer:
        """Attaches the method to a model."""
        return DeMoPeer(self, model, group)


class DeMoPeer(OptimizerPeer):
    """DeMo on one site.

    Its memory is `momentum`, m of every parameter, in the parameter's shape.
    """

    def __init__(self, settings: DeMo, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__(model, group)
        self._settings = settings
        self._momentum = self.remember("momentum")
        self._hidden = set(hidden_weights(model))
        how = settings.side, settings.entries, settings.bits
        self._message = Message(self.params.values(), *how)
        self._chunks = dict(zip(self.params, self._message.chunks, strict=True))

    def share_gradients(self, lr: float) -> None:
        """Moves the weights and drops their gradients, or leaves gradients to the optimizer."""
        fast = {name: self._fast(name, lr) for name in self.params}
        means = self._in_one_bucket(fast) if self._settings.bucket else self._as_published(fast)
        for name, p in self.params.items():
            chunks = self._chunks[name]
            update = chunks.joined(chunks.from_cosines(means[name]))
            if self._settings.sign:
                p.sub_(self._step(name, update, lr))
                p.grad = None
            else:
                p.grad = update / lr if lr else torch.zeros_like(update)

    def _step(self, name: str, update: Tensor, lr: float) -> Tensor:
        """Returns by how much a weight goes down; η is in the momentum already."""
        if self._settings.update == "identity":
            return update
        orth = self._settings.update == "orth" and name in self._hidden
        return lr * (muon_step(update) if orth else update.sign())

    def _fast(self, name: str, lr: float) -> Entries:
        """Adds the gradient to the momentum; returns q, which is still in the momentum."""
        m, chunks = self._momentum[name], self._chunks[name]
        m.mul_(self._settings.beta).add_(self.gradient(name), alpha=lr)
        return chunks.largest(chunks.cosines(chunks.cut(m)))

    def _take_out(self, name: str, q: Entries) -> None:
        chunks = self._chunks[name]
        sent = chunks.joined(chunks.from_cosines(chunks.filled(q)))
        self._momentum[name].sub_(sent, alpha=self._settings.alpha)

    def _as_published(self, fast: dict[str, Entries]) -> dict[str, Tensor]:
        """Returns the mean of the sites' q of every parameter, as chunks (C, O', I')."""
        means = {}
        for name, q in fast.items():
            self._take_out(name, q)
            sent = zip(self.sites.gather(q.places_CK), self.sites.gather(q.values_CK), strict=True)
            means[name] = mean_of(self._chunks[name], [Entries(*one) for one in sent])
        return means

    def _in_one_bucket(self, fast: dict[str, Entries]) -> dict[str, Tensor]:
        """Returns the means of one bucket; rounding errors of values stay in the momentum."""
        own = self._message.written(list(fast.values()))
        for name, q in zip(fast, self._message.read(own), strict=True):
            self._take_out(name, q)
        return dict(zip(fast, self._message.mean(self.sites.gather(own)), strict=True))
