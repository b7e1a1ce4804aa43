"""PowerSGD: the baseline of low-rank compression, in outergrad's messages."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.core.coding import Wire, drops, stacked
from outergrad.drift.on_drift import OnDrift
from outergrad.methods.common import Settings, require
from outergrad.methods.low_rank.compressor import LowRankCompressor
from outergrad.methods.low_rank.settings import LowRankSettings


@dataclass(frozen=True, kw_only=True, repr=False)
class PowerSGD(Settings):
    """Low rank of gradients that are formed first, with a memory of the size of the model.

    Choose it as a baseline, or where no site may see another's part of a sum. `og.RankDAD` needs
    less memory.

    It computes what the `powerSGD_hook` of DistributedDataParallel does. Every gradient is a matrix
    of its first dimension by all others. Each training step makes one step of subspace iteration on
    the mean over the sites, starting from the result of the last one. Source: Vogels, Karimireddy
    and Jaggi, 2019, algorithms 1 and 2.

    Attributes:
        rank: Rank that is sent per layer.
        error_feedback: True if the unsent part of one step is added to the next gradient.
        wire: `og.wire.BF16()` rounds what is sent to half the bytes; sketches are summed, so other
            codecs do not fit.
        min_ratio: A layer is sent at low rank only if dense is more than this many times the bytes,
            as the hook's `min_compression_rate`.
        bucket_bytes: Payload of one message, bytes, before the next layer opens another.
        every: k: gradients are shared at every k-th synchronised backward pass only. Until then
            each site sums up its gradients; their mean is shared (docs/methods.md). Or
            `og.OnDrift(...)`: whenever a site's data drift.
    """

    rank: int = 1
    error_feedback: bool = True
    wire: Wire = ()
    min_ratio: float = 2.0
    bucket_bytes: int = 1 << 16
    every: int | OnDrift = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        summable = not drops(stacked(self.wire))
        require(summable, self, "wire", "BF16() at most: what is sent is added up")

    def compressor(self) -> LowRankCompressor:
        """Returns a new compressor with these settings."""
        settings = _OfMatrices(
            rank=self.rank,
            reduce="all_reduce",
            error_feedback="dense" if self.error_feedback else None,
            wire=self.wire,
            min_ratio=self.min_ratio,
            bucket_bytes=self.bucket_bytes,
        )
        return LowRankCompressor(settings)


class _OfMatrices(LowRankSettings):
    """Low-rank settings with which every gradient is formed."""

    taps = False
