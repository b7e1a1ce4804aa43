"""Units in the backward passes of one step, of which each may be in one pass only."""

from __future__ import annotations

from collections.abc import Iterable


class Passes:
    """Ids of the units in the passes so far.

    A unit in two passes would be clipped in each of them, and be in the sum with twice the length
    that was promised.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def add(self, ids: Iterable[str]) -> None:
        """Adds the units of a pass.

        Raises:
            RuntimeError: an earlier pass of this step had one of them.
        """
        found = set(ids)
        if found & self._seen:  # an error does not show ids: its text may be told to other sites
            raise RuntimeError(
                f"{len(found & self._seen)} of the {len(found)} units of this backward were in an "
                f"earlier one of the same step, and would be clipped in both, to twice the length "
                f"together: put all samples of a unit into one pass"
            )
        self._seen |= found

    def forget(self) -> None:
        """Begins a new step."""
        self._seen.clear()
