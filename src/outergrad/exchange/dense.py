"""Dense exchange: what everybody else does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Every gradient is all-reduced in buckets during backward, as DDP does."""

    def exchange(self) -> None:
        """None: nothing travels as factors."""
        return
