"""Prediction of headers: a step that announces what the last ones did needs no exchange."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from outergrad.messages.header import Header

Facts = Callable[[Sequence[Header]], Hashable]
"""Returns a key of what the plan of a step and the lengths of its messages depend on."""


class HeaderCache:
    """Predicts the headers of the next step if the last steps had the same plan.

    All sites predict alike. A wrong prediction costs a step that is sent twice, so each one doubles
    the equal steps required for the next: varying batches soon cost no more than their headers.

    Args:
        facts: returns the key of the plan and message lengths that headers lead to.
        ways: returns the routes that headers lead to, the most important part of `facts`.

    Attributes:
        known: headers that predictions are based on; the same object while the predictions hold.
    """

    def __init__(self, facts: Facts, ways: Facts) -> None:
        self._facts, self._ways = facts, ways
        self.known: list[Header] = []
        self._equal, self._enough = 0, 1
        self._no_surprise: Hashable = None
        """Facts of this site that differed from the prediction but did not change the plan."""

    def foreseen(self, step: int) -> list[Header] | None:
        """Returns the predicted headers of a step; None if they have to be exchanged."""
        if self._equal < self._enough or not all(header.alone for header in self.known):
            return None
        return [header.of_step(step) for header in self.known]

    def foresees(self, known: Sequence[Header]) -> bool:
        """True if the next step is predicted from these headers, without an exchange."""
        return known is self.known and self._equal >= self._enough

    def surprises(self, ours: Header, foreseen: Sequence[Header]) -> bool:
        """True if this site's header would lead to another plan than the predicted headers.

        Also true if the plan would change only were the batches of all sites like this site's.
        Where the plan depends on the largest batch, all batches may have become smaller, and no
        site alone would change it.
        """
        if ours.facts in (foreseen[ours.rank].facts, self._no_surprise):
            return False
        truly = [ours if header.rank == ours.rank else header for header in foreseen]
        if self._facts(truly) != self._facts(foreseen):
            return True
        before, now = (
            self._ways([replace(header, uses=own.uses) for header in foreseen])
            for own in (foreseen[ours.rank], ours)
        )
        if before == now:
            self._no_surprise = ours.facts
        return before != now

    def exchanged(self, headers: Sequence[Header]) -> None:
        """Records the headers that the sites exchanged in a step."""
        same = bool(self.known) and self._facts(headers) == self._facts(self.known)
        self._equal = self._equal + 1 if same else 0
        self.known, self._no_surprise = list(headers), None

    def was_wrong(self) -> None:
        """Records that some site's header differed from the prediction."""
        self._enough *= 2
        self.forget()

    def follow(self, before: HeaderCache) -> None:
        """Takes over from the cache used before; forgets its headers if the loop has changed since.

        All that differs between steps of one loop (other sessions on the group, weights, parameters
        in use, buffers) was in the headers of the last steps, whatever their methods.
        """
        if before.known and self._about_loops() != before._about_loops():
            self.forget()

    def _about_loops(self) -> list[Hashable]:
        return [header.about_loop for header in self.known]

    def forget(self) -> None:
        """Forgets the recorded headers, so that the next step exchanges headers."""
        self.known, self._equal, self._no_surprise = [], 0, None
