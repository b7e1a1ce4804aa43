"""Dense method with captured layers, for transforms that need single samples."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.methods.dense import Dense, DenseCompressor


@dataclass(frozen=True, kw_only=True, repr=False)
class CapturedDense(Dense):
    """`Dense` with captured layers: each site knows the activations and deltas of its own rows."""

    def compressor(self) -> DenseCompressor:  # type: ignore[override]
        """Returns a new compressor."""
        return DenseCompressor()
