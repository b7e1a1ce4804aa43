"""Rounds of push-sum: a site gives to some neighbours, and takes what others have given."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.core.sites import Site
from outergrad.core.transport import Comm, Letter, Lines
from outergrad.core.types import StateDict
from outergrad.gossip.graphs import neighbours
from outergrad.gossip.push import PushSum
from outergrad.gossip.settings import Gossip
from outergrad.session.gossip_rounds import Met

MOST_ON_THEIR_WAY = 3
"""Pushes to a neighbour that it has not taken yet; it is given no more before it takes one."""
_NOTHING = torch.empty(0, dtype=torch.uint8)


class PushLine:
    """The line to one neighbour: pushes either way, an answer to each, and marks.

    A site takes one push per round of the edge, so that a training repeats to the bit, whichever
    site is faster. Pushes have the numbers of these rounds. If some were left out, because this
    site was away, it notices by a number, and takes all that are there.

    Each site sends a mark where all settle, before a state is saved or a mean is formed: what was
    pushed before it is part of the state, and what is pushed behind it is not.

    Args:
        site: the neighbour.
        lines: to all neighbours.

    Attributes:
        site: as the argument.
        fault: why nothing more is read of the neighbour; "" while it keeps to the rules.
    """

    def __init__(self, site: Site, lines: Lines) -> None:
        self.site, self._lines, self.fault = site, lines, ""
        self._came = deque[Letter]()
        self._rounds = self._on_their_way = self._taken = self._marked = 0
        self._awaited_marks = 0
        """Below 0 where the neighbour has settled, and this site not yet."""
        self._is_away = self._is_full = self._forgets = False

    @property
    def why_closed(self) -> str:
        """The reason why the neighbour will never send anything more; "" while it may."""
        return self.fault or self._lines.why_closed(self.site)

    @property
    def is_settled(self) -> bool:
        """True if the neighbour has settled as often as this site."""
        return self._awaited_marks <= 0

    # -- rounds -----------------------------------------------------------------------------------

    def has_room(self, until: float) -> bool:
        """Begins a round, and waits until a push may follow; not for a neighbour that is away."""
        self._rounds += 1
        if self._is_full:
            until = 0.0
        while self._on_their_way == MOST_ON_THEIR_WAY and self._read(until):
            pass
        self._is_full = self._on_their_way == MOST_ON_THEIR_WAY
        return not self._is_full and not self.why_closed

    def push(self, content: Tensor, share: float) -> None:
        """Sends what the neighbour is given in this round."""
        self._on_their_way += 1
        self._lines.send(self.site, Letter(self._rounds, share, content))

    def pushed(self, until: float) -> list[Letter]:
        """Returns what the neighbour gives in a round; nothing if it is away."""
        if self._is_away:
            until = 0.0
        while not self._came and self._read(until):
            pass
        self._is_away = not self._came
        if self._is_away:
            return []
        if self._came[0].number == self._taken + 1:
            return [self._take()]
        while self._read(0.0):
            pass
        return self._take_all()

    # -- marks ------------------------------------------------------------------------------------

    def mark(self, *, forget: bool = False) -> None:
        """Sends a mark.

        Args:
            forget: whether what was pushed to this site before the neighbour's mark is dropped.
        """
        self._awaited_marks += 1
        self._forgets = forget and not self.is_settled
        if forget:
            self._take_all()
        self._lines.send(self.site, Letter(self._rounds, 0.0, _NOTHING, ends=True))

    def pushed_before_mark(self, until: float) -> list[Letter]:
        """Waits for the neighbour's mark; returns all that it has given before that."""
        while not self.is_settled and self._read(until):
            pass
        found = self._take_all()
        if self.is_settled:
            self._taken = self._marked
        return found

    # -- letters ----------------------------------------------------------------------------------

    def _read(self, until: float) -> bool:
        """Reads a letter; False if none has come, or this site has to settle first."""
        if self._awaited_marks < 0 or self.fault:
            return False
        letter = self._lines.next(self.site, until)
        if letter is None:
            return False
        if letter.ends:
            self._awaited_marks -= 1
            self._forgets = self._forgets and not self.is_settled
            self._marked, self._is_away = letter.number, False
        elif not letter.content.numel():
            self._on_their_way -= 1
        elif self._forgets:
            self._answer()
        else:
            self._came.append(letter)
        if self._on_their_way < 0 or len(self._came) > MOST_ON_THEIR_WAY:
            self.fault = "it answers more, or says more, than it was given"
        return True

    def _take_all(self) -> list[Letter]:
        return [self._take() for _ in range(len(self._came))]

    def _take(self) -> Letter:
        letter = self._came.popleft()
        self._taken = letter.number
        self._answer()
        return letter

    def _answer(self) -> None:
        self._lines.send(self.site, Letter(0, 0.0, _NOTHING))


class _Push(NamedTuple):
    """A round under way: who is to be given, who is to give, who was given, and when it began."""

    receivers: list[PushLine]
    givers: list[PushLine]
    there: list[PushLine]
    began: float


class PushRounds:
    """Rounds over a directed graph, of which each gives away a part of this site's weights.

    Args:
        method: says who gives to whom, and what is told.
        shown: the weights, which the user's optimizers change.
        comm: the transport.
        number: of the session.

    Attributes:
        sum: this site's part.
    """

    def __init__(self, method: Gossip, shown: Sequence[Tensor], comm: Comm, number: int) -> None:
        self._method, self._comm = method, comm
        self.sum = PushSum(shown, method.pushing)
        near = neighbours(method.way, comm.world_size, comm.rank)
        lines = comm.exchange_with(near, number, self.sum.most_bytes) if near else None
        self._lines = lines
        self._near = {site: PushLine(comm.sites[site], lines) for site in near if lines}
        self._now: _Push | None = None

    @property
    def receivers(self) -> list[Site]:
        """The neighbours to which this site gives in any step."""
        edges = self._method.way.all_edges(self._comm.world_size)
        return [self._comm.sites[j] for i, j in sorted(edges) if i == self._comm.rank]

    @property
    def is_open(self) -> bool:
        """True if a round has begun and not ended."""
        return self._now is not None

    @property
    def figures(self) -> dict[str, float]:
        """This site's mass, by the figure's name."""
        return {"push_mass": self.sum.mass}

    @torch.no_grad()
    def begin(self, step: int, *, whole: bool = False) -> None:
        """Gives to the neighbours of a step.

        Args:
            step: of the graph.
            whole: whether all weights travel, whatever the method is.
        """
        rank, began = self._comm.rank, time.monotonic()
        edges = self._method.way.edges(self._comm.world_size, step)
        receivers = [self._near[other] for one, other in edges if one == rank]
        givers = [self._near[one] for one, other in edges if other == rank]
        until = began + self._comm.patience_s
        self.sum.take_steps()
        there = [line for line in receivers if line.has_room(until)]
        if there:
            gamma = 1.0 if whole else self._method.pushing.gamma
            share = gamma / (1 + len(receivers))  # of those that are away it keeps it
            content = self.sum.give(len(there), share, step, whole=whole)
            for line in there:
                line.push(content, share)
        self._now = _Push(receivers, givers, there, began)

    @torch.no_grad()
    def end(self) -> Met:
        """Takes what others give, without waiting for long, and shows the weights of now."""
        assert self._now is not None
        now, self._now = self._now, None
        until = now.began + self._comm.patience_s
        heard = [line for line in now.givers if self._took(line, line.pushed(until))]
        self.sum.show()
        met = {line.site for line in now.there if line in heard or line not in now.givers}
        met |= {line.site for line in heard if line not in now.receivers}
        away = {line.site for line in (*now.receivers, *now.givers)} - met
        waited_s = time.monotonic() - now.began
        return Met(frozenset(line.site for line in heard), frozenset(away), waited_s)

    def _took(self, line: PushLine, letters: Sequence[Letter]) -> bool:
        """Adds what a neighbour gives; returns whether it gave anything."""
        try:
            for letter in letters:
                self.sum.take(letter.content, letter.share)
        except ValueError as error:
            line.fault = str(error)
        return bool(letters) and not line.fault

    # -- between two steps ------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self) -> list[Site]:
        """Takes all that was given before now; called on all sites.

        Returns:
            Neighbours whose marks have not come in time: what they gave is taken later.
        """
        for line in self._near.values():
            line.mark()
        until = time.monotonic() + self._comm.patience_s
        came = [(line, line.pushed_before_mark(until)) for line in self._near.values()]
        if any(letters for _, letters in came):  # else the weights stay as they are, to the bit
            self.sum.take_steps()
            for line, letters in came:
                self._took(line, letters)
            self.sum.show()
        return [line.site for line in self._near.values() if not line.is_settled]

    def summands(self) -> list[Tensor]:
        """Returns copies of x and of the mass, whose sums over all sites give the mean."""
        return self.sum.summands()

    @torch.no_grad()
    def take_mean(self, sums: Sequence[Tensor]) -> None:
        """Shows the mean of all sites, and goes on from it with a mass of 1.

        Args:
            sums: of what all sites' `summands` returned.
        """
        self.sum.begin_at_mean(sums)

    def why_away(self, site: int) -> str:
        """Returns why a neighbour is away."""
        return self._near[site].why_closed or "it did not answer in time"

    def state(self) -> StateDict:
        """Returns this site's part of the sum."""
        return self.sum.state()

    @torch.no_grad()
    def load(self, state: StateDict, unsettled: Sequence[int]) -> None:
        """Goes on from a saved state, and drops what was given before now; called on all sites.

        Args:
            state: what `state()` returned.
            unsettled: neighbours that had not settled by then: what they gave is not in it.
        """
        for line in self._near.values():
            line.mark(forget=True)
        until = time.monotonic() + self._comm.patience_s
        for line in self._near.values():
            line.pushed_before_mark(until)
        self.sum.load(state)

    def close(self) -> None:
        """Says goodbye to the neighbours."""
        if self._lines is not None:
            self._lines.close()
