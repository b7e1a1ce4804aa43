"""Sparse gradients: sites send a few entries of each, and the others in later steps."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.methods.entries.compressor import SparseCompressor
from outergrad.methods.entries.settings import SparseSettings


@dataclass(frozen=True, kw_only=True, repr=False)
class Sparse(SparseSettings):
    """Sites send a few entries of each weight gradient, and the others in later steps.

    Choose it where gradients have few large entries, or to compare with the literature on sparse
    communication. Try `og.RankDAD` first: it reached a higher accuracy at the same bytes on all
    models that were compared (docs/paper.md). Biases, norms and other vectors travel whole, and so
    does a weight whose dense gradient is fewer bytes.

    Sources: Aji and Heafield, 2017, for the largest entries; Lin et al., "Deep Gradient
    Compression", arXiv 1712.01887, for momentum and warm-up; Foroutan Eghlidi and Jaggi, "Sparse
    Communication for Training Deep Networks", arXiv 2009.09271, for the choices; Abdelmoniem et
    al., SIDCo, arXiv 2101.10761, for the threshold.

    Attributes:
        density: Share of the entries of a weight that is sent per step, in (0, 1].
        select: Which entries are sent. "topk": those of largest magnitude. "threshold": the same
            entries, found faster by an estimated threshold. "blocks": the blocks of `block` entries
            with the largest norm, whose places are fewer bytes. "random": the same random entries
            on all sites, so that no places are sent and values are all-reduced: bytes do not grow
            with the sites. "random_blocks": likewise, but whole blocks of consecutive entries.
        block: Entries of a block.
        error_feedback: True if the unsent part of one step is added to the next gradient, in a
            memory of the size of the model.
        momentum: Momentum correction: a site sums up its gradients with this momentum before it
            chooses entries. Use an optimizer without momentum for these weights then. Parameters
            that travel whole get no momentum from this: see `session.coverage()`. 0 for none.
        warmup: Shared steps in which the density falls from 0.25, in four stages; 0 for none.
        seed: Seed of the random selections.
        wire: Codecs of `og.wire` for the values. With error feedback their loss is sent later.
            Random selections take `og.wire.BF16()` at most, because sums travel: a site sends later
            what it rounds before summation, but the rounding of the sum, at most 2⁻⁹ of it per
            site, is known to no site and is lost.
        always: Sends entries even where the dense gradient is fewer bytes.
        bucket_bytes: Payload of one message, bytes, before the next layer opens another.
        every: k: gradients are shared at every k-th synchronised backward pass only. Until then
            each site sums up its gradients; their mean is shared (docs/methods.md).
    """

    def compressor(self) -> SparseCompressor:
        """Returns a new compressor with these settings."""
        return SparseCompressor(self)
