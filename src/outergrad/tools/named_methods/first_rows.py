"""Baseline for rank-dAD: the first rows of a batch in place of its leading directions."""

from collections.abc import Sequence
from dataclasses import dataclass

from outergrad.core.types import Factors, Part, Slot
from outergrad.linalg.outer import row_sum
from outergrad.methods.dad import DAD, DADCompressor


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """Sites send the raw factors of the first rows of their batches, and bias gradients whole.

    Attributes:
        rank: R, the number of rows.
        every: k: share at every k-th synchronised backward pass.
    """

    rank: int = 8
    every: int = 1

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"FirstRows(rank={self.rank}): use 1 or more")

    def compressor(self) -> "FirstRowsCompressor":
        """Returns a new compressor with these settings."""
        return FirstRowsCompressor(self.rank)


class FirstRowsCompressor(DADCompressor):
    """Drops all rows but the first R."""

    exact = False

    def __init__(self, rank: int) -> None:
        super().__init__(DAD(always=True, reveal="activations"))
        self._rank = rank

    def sent_rows(self, slot: Slot, rows: int, site: int = 0) -> int:
        """Returns R, or the number of rows if there are fewer."""
        return min(rows, self._rank)

    def sends_bias(self, slot: Slot) -> bool:
        """True if the slot has a bias, whose gradient includes the rows that are dropped."""
        return slot.bias is not None

    def compress(self, parts: Sequence[Part]) -> list[Factors]:
        """Returns the factors of each part's first rows."""
        return [self._first(part) for part in parts]

    def _first(self, part: Part) -> Factors:
        assert isinstance(part.gradient, Factors)
        d_GRO, a_GRI, _ = part.gradient
        b_GO = row_sum(d_GRO) if self.sends_bias(part.slot) else None
        return Factors(d_GRO[:, : part.rows], a_GRI[:, : part.rows], b_GO)
