"""Dense exchange: what everybody else does."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.methods.common import brief, require


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Every gradient is all-reduced in buckets during backward, as DDP does.

    Attributes:
        every: share at every so many-th synchronised backward; between these the gradients are
            summed up on each site, and what is shared is their mean (docs/methods.md).
    """

    every: int = 1

    def __post_init__(self) -> None:
        """Checks the settings."""
        require(self.every >= 1, self, "every", "1 or more")

    def __repr__(self) -> str:
        """With the settings that are not the default."""
        return brief(self)

    def exchange(self) -> None:
        """None: nothing travels as factors."""
        return
