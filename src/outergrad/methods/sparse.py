"""Sparse gradients: sites send a few entries of each, and the others in later steps."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.methods.entries.compressor import SparseCompressor
from outergrad.methods.entries.settings import SparseSettings


@dataclass(frozen=True, kw_only=True, repr=False)
class Sparse(SparseSettings):
    """Sites send a few entries of each weight gradient, and the others in later steps.

    Choose it where gradients have few large entries, or to compare with what the literature on
    sparse communication does. Try `og.RankDAD` first: it reached a higher accuracy at the same
    bytes on all models that were compared (docs/paper.md). Biases, norms and other
    vectors travel whole, and so does a weight of which all are fewer bytes.

    Sources: Aji and Heafield, 2017, for the largest entries; Lin et al., "Deep Gradient
    Compression", arXiv 1712.01887, for momentum and warm-up; Foroutan Eghlidi and Jaggi, "Sparse
    Communication for Training Deep Networks", arXiv 2009.09271, for the choices; Abdelmoniem et
    al., SIDCo, arXiv 2101.10761, for the threshold.

    Attributes:
        density: the share of the entries of a weight that is sent per step, in (0, 1].
        select: which. "topk": those of largest magnitude. "threshold": the same, found faster by
            an estimated threshold. "blocks": the blocks of `block` entries with the largest norm,
            whose places are fewer bytes. "random": the same random ones on all sites, so that
            their places need not be sent and their values are all-reduced: bytes do not grow with
            the sites. "random_blocks": likewise, but whole blocks, of consecutive entries.
        block: entries of a block.
        error_feedback: whether what was not sent in one step is added to the next gradient, in a
            memory of the size of the model.
        momentum: of momentum correction: a site sums up its gradients with this momentum before it
            chooses. Use an optimizer without momentum for these weights then. What travels whole
            has no momentum of this: see `session.coverage()`. 0 for none.
        warmup: shared steps in which the density falls from 0.25, in four stages; 0 for none.
        seed: of what is random.
        wire: codecs of `og.wire` that the values go through. What they lose is sent later, with
            error feedback. What is random takes `og.wire.BF16()` at most, because sums travel:
            what a site rounds before it is added is sent later, but what is lost in rounding a
            sum, at most 2⁻⁹ of it per site, no site knows.
        always: send entries even where the dense gradient is fewer bytes.
        bucket_bytes: payload of one message before the next layer opens another.
        every: k: share at every k-th synchronised backward only. Until then each site sums up its
            gradients; what is shared is their mean (docs/methods.md).
    """

    def compressor(self) -> SparseCompressor:
        """A new compressor with these settings."""
        return SparseCompressor(self)
