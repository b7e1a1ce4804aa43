"""How sites that gave up agree on what counts: in a store, in slots that are written once.

Each site has a slot for its word: how many steps it has applied. A site that waits for it for too
long writes there that it was given up; whichever comes first stays. So all read the same words,
and the greatest number in them is where all go to: who has made the step puts it there for the
others, in another slot that is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outergrad.step.lost import late_sites
from outergrad_lab.checking.network import Store, StoreGoneError
from outergrad_lab.checking.world import Process, Waiting

CALL_S, CLOSED_S = 2.0, 2.0
"""For a call of the store; how long to wait for the word of who closed a connection."""
_GIVEN_UP, _THERE, _NOWHERE = "given up", "there", "nowhere"
TROUBLE = "trouble"
"""The key that says that some site has given up."""


@dataclass(frozen=True)
class Word:
    """What a site leaves.

    Attributes:
        applied: how many steps.
        sent: whether it has sent messages of the next one: if not, nobody can have applied that.
        silent: sites for which it waited in vain.
        closed: those whose connection it found closed.
        ended: whether it left because its program raised.
        done: whether it left in order, when all had applied as many steps.
    """

    applied: int
    sent: bool
    silent: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()
    ended: bool = False
    done: bool = False


@dataclass(frozen=True)
class Agreed:
    """What a site knows in the end.

    Attributes:
        parts: of the step that it has still to apply, if there is one.
        lost: as of `SiteLostError`.
        certain: as there.
        may_differ: as there.
    """

    parts: frozenset[int] | None = None
    lost: tuple[int, ...] = ()
    certain: bool = True
    may_differ: tuple[int, ...] = ()


class Agreement:
    """Of one site with the others that are left.

    Args:
        store: where they meet.
        process: of this site.
        sites: how many there are.
        patience_s: T.
        word: this site's.
        kept: the messages of a step, if they are still there.
    """

    def __init__(
        self,
        store: Store,
        process: Process,
        sites: int,
        patience_s: float,
        word: Word,
        kept: Callable[[int], frozenset[int] | None],
    ) -> None:
        self._store, self._process, self._patience_s = store, process, patience_s
        self._rank, self._word, self._kept = process.rank, word, kept
        self._others = [site for site in range(sites) if site != process.rank]

    def reach(self, on_left: Callable[[], None]) -> Waiting[Agreed]:
        """All of it.

        Args:
            on_left: called once the word is there: the others may hear of the trouble.
        """
        applied, parts, confirmed = self._word.applied, None, set[int]()
        words, numbers = dict[int, Word](), dict[int, int]()
        try:
            words = yield from self._words(on_left)
            numbers = {site: one.applied for site, one in words.items()}
            goal = max(numbers.values(), default=applied)
            if min(numbers.values(), default=applied) < goal:
                there = yield from self._forward(goal, applied)
                if there is not None:
                    numbers = dict.fromkeys(numbers, goal)
                    parts, applied = (there, goal) if applied < goal else (None, applied)
            yield from self._call(lambda: self._store.set(f"made {self._rank}", applied))
            done = {site for site, word in words.items() if word.done and word.applied == applied}
            asked = set(words) - {self._rank} - done
            confirmed = done | (yield from self._confirmed(asked))
            yield from self._leave(asked)
        except StoreGoneError:
            on_left()
            if not confirmed and parts is None:
                return self._alone()
        return self._agreed(words, numbers, applied, confirmed, parts)

    def _words(self, on_left: Callable[[], None]) -> Waiting[dict[int, Word]]:
        """Those of the sites that were not given up: the same on every site."""
        yield from self._first(f"word {self._rank}", self._word)
        yield from self._call(lambda: self._store.set(TROUBLE, True))
        on_left()
        found, began = dict[int, Word](), self._process.world.now
        for site in (self._rank, *self._others):
            closed = site in self._word.closed
            limit_s = min(CLOSED_S, self._patience_s) if closed else self._patience_s
            yield from self._until_there(f"word {site}", began + limit_s)
            word = yield from self._first(f"word {site}", _GIVEN_UP)
            if isinstance(word, Word):
                found[site] = word
        return found

    def _forward(self, goal: int, applied: int) -> Waiting[frozenset[int] | None]:
        """The messages of the step before the goal, if those who lack them can have them."""
        parts = self._kept(goal - 1)
        if applied == goal and parts is not None:
            yield from self._call(lambda: self._store.set(f"step {goal}", parts))
            yield from self._first(f"way to {goal}", _THERE)
        else:
            until = self._process.world.now + self._patience_s
            yield from self._until_there(f"way to {goal}", until)
        way = yield from self._first(f"way to {goal}", _NOWHERE)
        if way == _NOWHERE:
            return None
        return (yield from self._call(lambda: self._store.values[f"step {goal}"]))

    def _confirmed(self, sites: set[int]) -> Waiting[set[int]]:
        """Those who have said that they are where all are."""
        until, found = self._process.world.now + self._patience_s, set[int]()
        for site in sites:
            there = yield from self._until_there(f"made {site}", until)
            found |= {site} if there else set()
        return found

    def _leave(self, others: set[int]) -> Waiting[None]:
        """The store ends with the site that holds it: that one goes last."""
        yield from self._call(lambda: self._store.set(f"read by {self._rank}", True))
        until = self._process.world.now + CALL_S
        for site in others if self._rank == self._store.host else ():
            yield from self._until_there(f"read by {site}", until)

    def _agreed(
        self,
        words: Mapping[int, Word],
        numbers: Mapping[int, int],
        applied: int,
        confirmed: set[int],
        parts: frozenset[int] | None,
    ) -> Agreed:
        unknown = {site for site in self._others if site not in words}
        apart = {site for site, number in numbers.items() if number != applied}
        ahead = any(number > applied for number in numbers.values())
        doubted = (set(self._others) - confirmed) | apart - {self._rank}
        level = [word for word in words.values() if word.applied == applied]
        may_be_ahead = bool(unknown) and all(word.sent for word in level)
        return Agreed(parts, self._lost(words), not (ahead or may_be_ahead), tuple(sorted(doubted)))

    def _lost(self, words: Mapping[int, Word]) -> tuple[int, ...]:
        """Who was given up, left, or was late."""
        if self._rank not in words:
            return tuple(self._others)
        given_up = set(self._others) - set(words)
        ended = {site for site, word in words.items() if word.ended}
        late = late_sites({site: word.silent for site, word in words.items()})
        return tuple(sorted(given_up or ended or late - {self._rank}))

    def _alone(self) -> Agreed:
        """Nothing can be known of the others."""
        host, others = self._store.host, tuple(self._others)
        suspects = (*self._word.silent, *self._word.closed)
        lost = suspects if host in (None, self._rank) else (host,)
        return Agreed(None, lost, not self._word.sent, others)

    # -- calls of the store -----------------------------------------------------------------------

    def _call(self, do: Callable[[], Any]) -> Waiting[Any]:
        return (yield from self._store.call(self._process, do, CALL_S))

    def _first(self, key: str, value: object) -> Waiting[Any]:
        """Writes once; returns what stands there."""
        return (yield from self._call(lambda: self._store.set_first(key, value)))

    def _until_there(self, key: str, until: float) -> Waiting[bool]:
        """Whether something came there in time."""
        while True:
            changes = self._store.changes
            if (yield from self._call(lambda: key in self._store.values)):
                return True
            while self._store.changes == changes:
                if self._process.world.now >= until:
                    return False
                yield until
