"""SparseLoCo: local steps, then the largest entries of the changes, in two bits each."""

from __future__ import annotations

from collections.abc import ItemsView
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from outergrad.methods.common import Settings, require
from outergrad_lab.peers.local_steps import LocalStepsPeer
from outergrad_lab.peers.packing import VALUES, Chunks, Message


@dataclass(frozen=True, kw_only=True, repr=False)
class SparseLoCo(Settings):
    """DiLoCo with error feedback and top-k in place of the outer momentum.

    After every H steps of each site's own optimizer, with θ the weights after these steps and θ'
    those of the last exchange:

        e ← β e + η (θ' - θ)
        q ← the K entries of largest magnitude of each chunk of e, in few bits
        e ← e - q
        θ, θ' ← θ' - mean of the sites' q

    Source: Sarfi, Thérien, Lidin and Belilovsky, Communication Efficient LLM Pre-training with
    SparseLoCo, arXiv 2508.15706; with η inside of e, which is equivalent while η is constant. As
    published: the formula, chunks of 64 x 64, indices in 12 bits. Ours: the encoding of a value in
    2 bits (`packing.TwoBits`: sign, and one of two magnitudes per weight), and that all parameters
    travel in one all-gather.

    Compare with it where sites may step by themselves: it is what `local-steps` has to beat. The
    paper's inner optimizer is AdamW; here it is the loop's.

    Attributes:
        every: H, steps between two exchanges, 15 to 30 as recommended.
        lr: η, the outer learning rate.
        beta: β, share of the error that stays.
        side: Largest length of a side of a chunk.
        entries: K, entries of a chunk.
        bits: Bits of a value: 2, 8 or 32.
    """

    every: int = 15
    lr: float = 1.0
    beta: float = 0.95
    side: int = 64
    entries: int = 64
    bits: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.lr > 0, self, "lr", "more than 0")
        require(0 <= self.beta <= 1, self, "beta", "a number from 0 to 1")
        for name in ("side", "entries"):
            require(getattr(self, name) >= 1, self, name, "1 or more")
        require(self.bits in VALUES, self, "bits", "2, 8 or 32")

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> SparseLoCoPeer:
        """Attaches the method to a model."""
        return SparseLoCoPeer(self, model, group)


class SparseLoCoPeer(LocalStepsPeer):
    """SparseLoCo on one site.

    Its memory is `error`, e, and `shared`, θ', of every parameter, in the parameter's shape.
    """

    def __init__(
        self, settings: SparseLoCo, model: nn.Module, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(settings.every, model, group)
        self._settings = settings
        self._error = self.remember("error")
        how = settings.side, settings.entries, settings.bits
        self._message = Message(self.params.values(), *how)
        self._chunks = dict(zip(self.params, self._message.chunks, strict=True))

    def exchange(self) -> None:
        """Moves the weights of the last exchange by the mean of what the sites send."""
        for name, p in self.params.items():
            change = self.shared[name] - p
            self._error[name].mul_(self._settings.beta).add_(change, alpha=self._settings.lr)
        own = self._message.written([c.largest(c.cut(self._error[n])) for n, c in self._each()])
        for (name, chunks), q in zip(self._each(), self._message.read(own), strict=True):
            self._error[name].sub_(chunks.joined(chunks.filled(q)))
        means = self._message.mean(self.sites.gather(own))
        for (name, chunks), mean in zip(self._each(), means, strict=True):
            self.shared[name].sub_(chunks.joined(mean))
            self.params[name].copy_(self.shared[name])

    def _each(self) -> ItemsView[str, Chunks]:
        return self._chunks.items()
