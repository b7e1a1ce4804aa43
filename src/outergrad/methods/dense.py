"""Dense exchange: what everybody else does."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.methods.common import Settings


@dataclass(frozen=True, kw_only=True, repr=False)
class Dense(Settings):
    """Every gradient is all-reduced in buckets during backward, as DDP does.

    Attributes:
        every: share at every so many-th synchronised backward; between these the gradients are
            summed up on each site, and what is shared is their mean (docs/methods.md).
    """

    every: int = 1

    def exchange(self) -> None:
        """None: nothing travels as factors."""
        return
