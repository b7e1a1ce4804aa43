"""rank-dAD: sites send the leading singular triplets of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.methods.low_rank.compressor import LowRankCompressor
from outergrad.methods.low_rank.settings import LowRankSettings


@dataclass(frozen=True, kw_only=True, repr=False)
class RankDAD(LowRankSettings):
    """Sites send the leading singular triplets of each weight gradient (rank-dAD).

    Choose it where layers see many rows, as in transformers and convolutions, or sites are many,
    and an approximate gradient will do: what is not sent in one step is sent later.

    Where the exact factors or the dense gradient are fewer bytes, these are sent. Biases and other
    vectors are sent exactly, unless `vectors` has codecs. For weights without a rule the gradient
    is formed, and its triplets are sent. Source: Baker et al., arXiv 2102.09631, the section on
    rank-dAD.

    Attributes:
        rank: Largest number of triplets that a site sends per layer.
        budget: Instead of a rank, the bytes that a site may send per step, as "160kB" or 160_000;
            or, below one, a fraction of the dense gradients' bytes, as 1/64. They are
            divided among the layers anew, often at first and then every `share_every` steps: each
            layer gets one triplet, and further ones go where a triplet has most energy per byte.
            Everything that a step sends counts, except buffers. With "auto" triplets are gathered.
            Choose reduce="two_way" among more than two sites of a process group: the same bytes buy
            about S / 2 times as many triplets there, in two rounds.
        share_every: Steps from one division of the budget to the next, and steps of the mean of
            the spectra that it goes by. With 1 shares follow each step; then ranks change in each
            step, too, and with them the messages.
        tolerance: Largest error that a site may make, relative to the Frobenius norm of its
            gradient, if `rank` triplets suffice for it: then it sends as few triplets as suffice. A
            rank that was too large or too small in one step is corrected in the next, without a
            message for it.
        solver: Solver that finds triplets to gather; "auto" goes by shape (docs/methods.md).
        iterations: Iterations of the iterative solvers; None for their own defaults.
        reduce: How the sites' triplets become a mean. "gather": every site sends its triplets to
            every other, in one round; bytes grow with the number of sites. "all_reduce": one step
            of subspace iteration on the mean gradient, which starts from the result of the last
            step; two rounds, and bytes do not depend on the number of sites. "alternate": half such
            a step, on one side of the matrix in turn; one round, half of the bytes. "two_way": each
            layer has an owner, which merges the triplets of all sites into `rank` triplets of the
            mean and sends these to all; two rounds, and neither bytes nor latency depend on the
            number of sites. "auto": gathers between two sites. Among more it measures the link when
            the model is distributed and takes the fastest of these, but never "alternate".
        error_feedback: What a site keeps of its unsent part, to add it to its next gradient.
            "factored": the `feedback_rank` leading triplets, in a memory of a few rows; of a small
            matrix all of it. "dense": all of it, in a memory of the size of the model. "auto": all
            of it, in six bits a number: less than a tenth of what Adam keeps, and rounded so that
            it is right on average (docs/methods.md). None: nothing; the unsent part is lost.
        feedback_rank: Triplets that "factored" keeps; None for half of `rank`, and 8 at least.
        wire: Codecs of `og.wire` for triplets: fewer bytes, at a loss, which error feedback sends
            later where it is more than rounding. Sums ("all_reduce", "alternate") can be sent as
            `og.wire.BF16()` alone; "auto" does not choose them for other codecs. Rows of embeddings
            that are sent by id have no memory: with error feedback they are rounded at most.
        vectors: Codecs for biases, norms and other vectors, which are not encoded by default. The
            loss is sent later, all of it, unless `error_feedback` is None.
        min_ratio: A layer is sent at low rank only if dense is more than this many times the bytes.
        bucket_bytes: Payload of one message, bytes, before the next layer opens another: small,
            because triplets are small, and those that are sent early need not be waited for.
        every: k: gradients are shared at every k-th synchronised backward pass only. Until then
            each site sums up its gradients; their mean is shared (docs/methods.md). Or
            `og.OnDrift(...)`: whenever a site's data drift.
    """

    def compressor(self) -> LowRankCompressor:
        """Returns a new compressor with these settings."""
        return LowRankCompressor(self)
