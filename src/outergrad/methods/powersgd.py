"""PowerSGD: the method that low rank is compared with, in the same frame."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.core.coding import Wire, drops, stacked
from outergrad.methods.common import Settings, require
from outergrad.methods.low_rank.compressor import LowRankCompressor
from outergrad.methods.low_rank.settings import LowRankSettings


@dataclass(frozen=True, kw_only=True, repr=False)
class PowerSGD(Settings):
    """Low rank of gradients that are formed first, with a memory of the size of the model.

    Choose it to compare with, or where no site may see another's part of a sum. `og.RankDAD`
    needs less memory.

    A baseline: what the `powerSGD_hook` of DistributedDataParallel does, in outergrad's messages.
    Every gradient is a matrix of its first dimension by all others; one step of subspace iteration
    on the mean over the sites per step of training, from where the last one ended. Source: Vogels,
    Karimireddy and Jaggi, 2019, algorithms 1 and 2.

    Attributes:
        rank: of what is sent per layer.
        error_feedback: whether what was not sent in one step is added to the next gradient.
        wire: `og.wire.BF16()` rounds what is sent to half the bytes; sketches are added up, so
            other codecs do not fit.
        min_ratio: send a layer at low rank only where that is so many times fewer bytes than
            dense, as the hook's `min_compression_rate`.
        bucket_bytes: payload of one message before the next layer opens another.
        every: k: share at every k-th synchronised backward only. Until then each site sums up its
            gradients; what is shared is their mean (docs/methods.md).
    """

    rank: int = 1
    error_feedback: bool = True
    wire: Wire = ()
    min_ratio: float = 2.0
    bucket_bytes: int = 1 << 16
    every: int = 1

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        summable = not drops(stacked(self.wire))
        require(summable, self, "wire", "BF16() at most: what is sent is added up")

    def compressor(self) -> LowRankCompressor:
        """A new compressor with these settings."""
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
    """Every gradient is formed."""

    taps = False
