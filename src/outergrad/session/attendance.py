"""This site's part in a loop over unequal numbers of batches."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.core.errors import StepDiscardedError
from outergrad.core.sites import Site
from outergrad.messages.header import Header, Join


class Attendance:
    """Tells headers whether this site is inside `session.join()`, and what the headers say of it.

    Attributes:
        join: this site's state, announced in its headers.
        has_left: True once a site, maybe this one, has left because its loop raised.
        last_active: rank of the first site that still had a batch in the last step.
    """

    def __init__(self) -> None:
        self.join, self.has_left, self.last_active = Join.NONE, False, 0

    def enter(self) -> None:
        """Begins a joined loop."""
        self.join, self.has_left, self.last_active = Join.INSIDE, False, 0

    def exit(self) -> None:
        """Ends the joined loop."""
        self.join = Join.NONE

    def leave(self) -> bool:
        """Leaves for good; False if this is known already, or there is no joined loop."""
        leaves = self.join != Join.NONE and not self.has_left
        self.has_left = self.has_left or leaves
        return leaves

    def note(self, headers: Sequence[Header]) -> None:
        """Notes who took part in a step that counts."""
        if self.join != Join.NONE:
            self.last_active = min(h.rank for h in headers if h.join == Join.INSIDE)

    def explained(
        self,
        error: StepDiscardedError,
        headers: Sequence[Header],
        step: int,
        sites: Sequence[Site],
    ) -> StepDiscardedError:
        """Returns the error for a step that was discarded, maybe because a site has left."""
        gone = next((h.rank for h in headers if h.join == Join.GONE), None)
        if gone is None:
            return error
        self.has_left = True
        return StepDiscardedError(
            f"the loop of {sites[gone].called} raised inside session.join(): it takes part in no "
            f"more steps, and step {step} must not be applied"
        )
