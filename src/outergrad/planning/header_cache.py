"""Whether a step may go without headers: they would say again what they said before."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from outergrad.messages.header import Header

Facts = Callable[[Sequence[Header]], Hashable]
"""What the plan of a step and its messages' lengths follow from."""


class HeaderCache:
    """Foresees the next headers where the last ones made for the same plan; alike on all sites.

    A surprise costs a step that is sent twice, so after each it takes twice as many equal steps
    to be sure again: batches that differ now and then soon cost no more than their headers.

    Args:
        facts: of a step.
        ways: how everything travels: the most important of these.
    """

    def __init__(self, facts: Facts, ways: Facts) -> None:
        self._facts, self._ways = facts, ways
        self._headers: list[Header] = []
        self._equal, self._enough = 0, 1
        self._no_surprise: Hashable = None
        """The facts of this site that changed nothing the last time."""

    def foreseen(self, step: int) -> list[Header] | None:
        """The headers that this step goes by, as if they had been exchanged; or None."""
        if self._equal < self._enough or not all(header.alone for header in self._headers):
            return None
        return [header.of_step(step) for header in self._headers]

    @property
    def known(self) -> Sequence[Header]:
        """What is foreseen goes by these; the same object as long as it does."""
        return self._headers

    def foresees(self, known: Sequence[Header]) -> bool:
        """Whether the next step goes by these headers, without an exchange of others."""
        return known is self._headers and self._equal >= self._enough

    def surprises(self, ours: Header, foreseen: Sequence[Header]) -> bool:
        """Whether this site's header would make for another plan than what was foreseen.

        Also if the plan changed only were all sites' batches like this one's: where it goes by the
        largest, all may have become smaller, and none by itself would change it.
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
        """Takes note of the headers of a step."""
        same = bool(self._headers) and self._facts(headers) == self._facts(self._headers)
        self._equal = self._equal + 1 if same else 0
        self._headers, self._no_surprise = list(headers), None

    def was_wrong(self) -> None:
        """Some site was surprised."""
        self._enough *= 2
        self.forget()

    def follow(self, before: HeaderCache) -> None:
        """Goes on behind another one: forgets what its loop has not been any more since.

        What differs between steps of one loop, as other sessions on the group, weights, parameters
        in use or buffers, was in the headers of the last steps, whatever methods these had.
        """
        if before._headers and self._about_loops() != before._about_loops():
            self.forget()

    def _about_loops(self) -> list[Hashable]:
        return [header.about_loop for header in self._headers]

    def forget(self) -> None:
        """What has been seen so far says nothing any more."""
        self._headers, self._equal, self._no_surprise = [], 0, None
