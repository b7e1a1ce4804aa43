"""What methods without memory have in common."""

from __future__ import annotations

import torch

from outergrad._types import Sketches, Slot


class Stateless:
    """An exchange of factors in which every step stands by itself."""

    wire: torch.dtype | None = None
    forced = False
    takes_plain = False
    sketches: Sketches | None = None

    def wanted_rows(self, slot: Slot) -> int:
        """Nothing: rows follow from the header."""
        return 0

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """Nothing to remember."""

    def settle(self, *, applied: bool) -> None:
        """Nothing to remember."""
