"""The dense method for transforms that need samples: layers are captured, and travel dense."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.methods.dense import Dense, DenseCompressor


@dataclass(frozen=True, kw_only=True, repr=False)
class CapturedDense(Dense):
    """As `Dense`, but the rows of layers are known to the site that captured them."""

    def compressor(self) -> DenseCompressor:  # type: ignore[override]
        """A new compressor."""
        return DenseCompressor()
