"""How sites that lost others agree on what counts: on a board, in slots that are written once.

Each site has a slot for its word: how many steps it has made. A site that waits for it in vain
writes there that it was given up; whichever comes first stands. So all read the same words, and
the greatest number in them is where all go: who has made that step puts what it brought on the
board, for those that lack a message of it.

A site may lie. Each slot is its writer's own, where the board sees to that (a hub's does, a store
does not). What sites say of each other's steps has to fit together: no two can be further apart
than one step, and all that have made the greatest number say by a digest what it brought. Where
it does not fit, nobody takes anything, nobody goes on, and all say who contradicts whom.

This is a generator: it yields what it asks of the board and is sent the answers. So the model of
the protocol (`outergrad_lab.checking`) runs the very same lines on a board of its own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outergrad.comm.standing import Standing
from outergrad.core.errors import BoardGoneError
from outergrad.step.board_requests import Asking, Farewell, First, Get, Gone, Put, Rest, Slot
from outergrad.step.going_on import GOING_ON, GoesOn
from outergrad.step.lost import FAREWELL_S, Findings, awaited_by, lost_of, named, told_by

ANSWERS_S = 2.0
"""How long to wait for the word of a site: one that lives has a thread that leaves it."""
STEP_S = 30.0
"""How long to wait for what a step brought, and for the others to have it."""
STAYS_S = 2.0
"""How long the site that holds the store waits until the others have read."""
_DIGITS = 20
GIVEN_UP, THERE, NOWHERE = "given up", "there", "nowhere"
TROUBLE = "trouble"
"""The slot that says that some site has given up."""


@dataclass(frozen=True)
class Outcome:
    """What a site knows in the end.

    Attributes:
        findings: of its error.
        content: what the step brought that this site has still to take; None if there is none.
        goes_on: who goes on without the others, if any do; this site, too.
    """

    findings: Findings
    content: Any = None
    goes_on: GoesOn | None = None


def word_slot(site: int) -> str:
    """Where a site writes its word, or others that they gave it up."""
    return f"word {site}"


def digest_of(content: bytes) -> str:
    """Of what a step brought."""
    return hashlib.sha256(content).hexdigest()


def _brought_slot(goal: int, site: int) -> str:
    """Where a site writes the digest of what the last of so many steps brought."""
    return f"brought {goal} {site}"


def _number(said: str) -> int:
    """Steps that a site says it has made in the end; -1 where it says what is no number."""
    return int(said) if said.isdecimal() and len(said) < _DIGITS else -1


def _step_key(goal: int, site: int) -> str:
    """Where it puts that."""
    return f"step {goal} {site}"


class Agreement:
    """Of one site with the others that are left.

    Args:
        rank: of this site.
        sites: how many there are.
        host: the site that the board ends with, if any.
        patience_s: T.
        word: this site's.
        kept: what a step brought, by how many steps there are with it; None if it is not known.
        clock: the time, in seconds.
        on_left: called once the word is there: from then on the others may hear of the trouble.
        min_sites: how many have to be left to go on without others; None where none do.
        digest: of a content.
    """

    def __init__(
        self,
        rank: int,
        sites: int,
        host: int | None,
        patience_s: float,
        word: Standing,
        kept: Callable[[int], Any],
        clock: Callable[[], float],
        on_left: Callable[[], None],
        min_sites: int | None = None,
        digest: Callable[[Any], str] = digest_of,
    ) -> None:
        self._rank, self._host, self._patience_s = rank, host, patience_s
        self._min_sites, self._digest = min_sites, digest
        self._word, self._kept, self._clock, self._on_left = word, kept, clock, on_left
        self._others = [site for site in range(sites) if site != rank]

    def reach(self) -> Asking[Outcome]:
        """All of it."""
        made, words, numbers, confirmed = self._word.made, dict[int, Standing](), {}, set[int]()
        content = goes_on = None
        liars = set[int]()
        try:
            words = yield from self._words()
            numbers = {site: one.made for site, one in words.items()}
            goal = max(numbers.values(), default=made)
            ahead = [site for site, one in words.items() if one.made == goal]
            lacks = min(numbers.values(), default=made) < goal
            if lacks and not (liars := self._liars(words, {})):
                wait_s = 0.0 if all(words[site].ended for site in ahead) else self._step_s
                is_there, found = yield from self._forwarded(goal, ahead, wait_s)
                if is_there:
                    numbers = dict.fromkeys(numbers, goal)
                    content, made = (found, goal) if made < goal else (None, made)
            yield First(f"made {self._rank}", str(made))
            ended = {site for site, one in words.items() if one.ended and one.made == made}
            asked = set(words) - {self._rank} - ended
            said = yield from self._confirmed(asked)
            confirmed = ended | said.keys()
            numbers |= {site: _number(text) for site, text in said.items()}
            if lacks and not liars:  # who has confirmed has said before what the step brought
                liars = self._liars(words, (yield from self._said_of(goal, ahead)))
            if not liars:
                level = {site for site, number in said.items() if number == str(made)}
                goes_on = yield from self._going_on(words, {self._rank, *level}, made)
            words = {**words, **(yield from self._reasons(words))}
            yield from self._leave(asked)
        except BoardGoneError:
            self._on_left()
            if not confirmed and content is None:
                return Outcome(self._alone())
        if liars:
            return Outcome(self._deceived(words, liars))
        return Outcome(self._findings(words, numbers, made, confirmed), content, goes_on)

    # -- on the board -----------------------------------------------------------------------------

    def _words(self) -> Asking[dict[int, Standing]]:
        """Those of the sites that were not given up: the same on every site."""
        yield First(word_slot(self._rank), self._word.text())
        yield First(TROUBLE, str(self._rank))
        self._on_left()
        found, until = dict[int, Standing](), self._clock() + min(ANSWERS_S, self._patience_s)
        for site in (self._rank, *self._others):
            word = yield from self._word_of(site, until)
            if word is not None:
                found[site] = word
        return found

    def _word_of(self, site: int, until: float) -> Asking[Standing | None]:
        """What a site has left; of who has left nothing in time, that it was given up."""
        while True:
            gone = self._min_sites is not None and (yield Gone(site))
            text = yield Slot(word_slot(site))
            if text is None and site != self._rank:
                text = yield Farewell(site)
                farewell = None if text is None else Standing.of(text)
                if text is not None and farewell is not None and not farewell.goes_on:
                    # Into the slot: it may be another text by the time that others look.
                    text = yield First(word_slot(site), text)
                else:
                    text = None
            if text is None and (gone or self._clock() >= until):
                text = yield First(word_slot(site), GIVEN_UP)
            if text is not None:
                return None if text == GIVEN_UP else Standing.of(text)
            yield Rest(until)

    @property
    def _step_s(self) -> float:
        return min(STEP_S, self._patience_s)

    def _forwarded(
        self, goal: int, ahead: Sequence[int], wait_s: float
    ) -> Asking[tuple[bool, Any]]:
        """Whether the step before the goal is there for those that lack it, and what it brought.

        Args:
            goal: how many steps there are with it.
            ahead: sites that have made it.
            wait_s: for how long to wait for it.
        """
        content = self._kept(goal) if self._word.made == goal else None
        if content is not None:
            yield First(_brought_slot(goal, self._rank), self._digest(content))
            yield Put(_step_key(goal, self._rank), content)
            way = yield First(f"way to {goal}", THERE)
            return way == THERE, content
        until = self._clock() + wait_s
        while (way := (yield Slot(f"way to {goal}"))) is None and self._clock() < until:
            yield Rest(until)
        way = yield First(f"way to {goal}", NOWHERE)
        for site in ahead if way == THERE else ():
            digest = yield Slot(_brought_slot(goal, site))
            found = None if digest is None else (yield Get(_step_key(goal, site)))
            if found is not None and self._digest(found) == digest:
                return True, found
        return False, None

    def _said_of(self, goal: int, ahead: Sequence[int]) -> Asking[dict[int, str]]:
        """What the sites that have made a step say of it."""
        found = dict[int, str]()
        for site in ahead:
            if (digest := (yield Slot(_brought_slot(goal, site)))) is not None:
                found[site] = digest
        return found

    def _confirmed(self, sites: set[int]) -> Asking[dict[int, str]]:
        """Those that have said that they are where all are, and where that is."""
        until, found = self._clock() + self._step_s, dict[int, str]()
        for site in sites:
            while (text := (yield Slot(f"made {site}"))) is None and self._clock() < until:
                yield Rest(until)
            if text is not None:
                found[site] = text
        return found

    def _going_on(
        self, words: Mapping[int, Standing], level: set[int], made: int
    ) -> Asking[GoesOn | None]:
        """Those that go on without others, as the first site says that has got here.

        Args:
            words: of all sites that were not given up.
            level: sites that have made as many steps as this one.
            made: so many.
        """
        if self._min_sites is None or self._rank not in words:
            return None
        lost = self._lost_as_seen_by(None, words, set(self._others) - words.keys())
        left = sorted(level - set(lost))
        if not lost or len(left) < self._min_sites or self._rank not in left:
            return None
        text = yield First(GOING_ON, GoesOn.proposed(made, left))
        return GoesOn.of(text, self._rank, made)

    def _reasons(self, words: Mapping[int, Standing]) -> Asking[dict[int, Standing]]:
        """Why sites closed their connections that were about to end: they say so a little later."""
        until, found = self._clock() + FAREWELL_S, dict[int, Standing]()
        for site in set(self._word.gone) & words.keys():
            word = words[site]
            if word.silent or word.gone or word.timed_out or word.why or word.ended:
                continue
            while (text := (yield Farewell(site))) is None and self._clock() < until:
                yield Rest(until)
            farewell = None if text is None else Standing.of(text)
            if farewell is not None and not farewell.goes_on:
                found[site] = replace(word, ended=farewell.ended, why=farewell.why)
        return found

    def _leave(self, others: set[int]) -> Asking[None]:
        """The board ends with the site that holds it: that one goes last."""
        yield First(f"read by {self._rank}", "all")
        until = self._clock() + STAYS_S
        for site in others if self._rank == self._host else ():
            while (yield Slot(f"read by {site}")) is None and self._clock() < until:
                yield Rest(until)

    # -- what follows -----------------------------------------------------------------------------

    def _findings(
        self,
        words: Mapping[int, Standing],
        numbers: Mapping[int, int],
        made: int,
        confirmed: set[int],
    ) -> Findings:
        others = {site: one for site, one in words.items() if site != self._rank}
        unknown = set(self._others) - others.keys()
        apart = {site for site, number in numbers.items() if number != made} - {self._rank}
        is_behind = any(number > made for number in numbers.values())
        lacking = tuple(sorted(site for site in apart if 0 <= numbers[site] < made))
        level = [one for one in words.values() if one.made == made]
        may_be_behind = bool(unknown) and all(one.sent for one in level)
        return Findings(
            lost=self._lost(words, unknown),
            counted=made > self._word.made,
            certain=not (is_behind or may_be_behind),
            may_differ=tuple(sorted((set(self._others) - confirmed) | apart)),
            lacking=lacking,
            awaited_by=awaited_by(self._rank, {**others, self._rank: self._word}),
            told=told_by(others),
        )

    def _liars(self, words: Mapping[int, Standing], said: Mapping[int, str]) -> set[int]:
        """Sites whose words cannot all be true: as far as can be told, those that lie.

        Args:
            words: of all sites that were not given up.
            said: what those that are ahead say that the last step brought.
        """
        apart = {
            (site, other)
            for site, one in words.items()
            for other, two in words.items()
            if one.made > two.made + 1 and not two.ended
        }
        apart |= {(site, other) for site in said for other in said if said[site] < said[other]}
        against = {site for pair in apart if self._rank in pair for site in pair} - {self._rank}
        counts = Counter(site for pair in apart for site in pair)
        most = max(counts.values(), default=0)
        return against or {site for site, count in counts.items() if count == most}

    def _deceived(self, words: Mapping[int, Standing], liars: set[int]) -> Findings:
        """Nobody can know how far the others are."""
        who = tuple(sorted(liars))
        doubt = f"{named(who)} told of {'its' if len(who) == 1 else 'their'} steps what cannot be"
        others = {site: one for site, one in words.items() if site != self._rank}
        return Findings(
            lost=who,
            certain=False,
            may_differ=tuple(self._others),
            told=told_by(others),
            doubt=doubt,
        )

    def _lost(self, words: Mapping[int, Standing], unknown: set[int]) -> tuple[int, ...]:
        if words and self._rank not in words:  # the others gave this site up
            return tuple(self._others)
        return self._lost_as_seen_by(self._rank, {**words, self._rank: self._word}, unknown)

    @staticmethod
    def _lost_as_seen_by(
        rank: int | None, words: Mapping[int, Standing], unknown: set[int]
    ) -> tuple[int, ...]:
        """Who has ended in order is to blame only where nobody else is."""
        own, known = -1 if rank is None else rank, dict(words)
        in_order = {s: replace(one, ended="") for s, one in words.items() if one.ended == "session"}
        return lost_of(own, known | in_order, unknown) or lost_of(own, known, unknown)

    def _alone(self) -> Findings:
        """Nothing can be known of the others."""
        suspects = tuple(sorted({*self._word.gone, *self._word.silent}))
        return Findings(
            lost=suspects if self._host in (None, self._rank) else (self._host,),
            certain=not self._word.sent,
            may_differ=tuple(self._others),
            doubt="the store of the group is gone",
        )
