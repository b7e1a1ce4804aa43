"""What methods without memory have in common."""

from __future__ import annotations

import torch

from outergrad._types import Slot


class Stateless:
    """An exchange in which every step stands by itself."""

    wire: torch.dtype | None = None
    forced = False

    def wanted_rows(self, slot: Slot) -> int:
        """Nothing: rows follow from the header."""
        return 0

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """Nothing to remember."""

    def settle(self, *, applied: bool) -> None:
        """Nothing to remember."""
