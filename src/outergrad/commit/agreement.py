"""Agreement of the sites that are left on what counts, through write-once slots of a board.

Each site has a slot for its failure report, which says how many steps it has made. A site that
waits for it in vain writes there that the other is given up; whichever comes first stands. So all
read the same reports. The greatest count in them is the goal of all: a site that has made that step
puts its result on the board, for sites that lack a message of it.

A site may lie. Where the board enforces it, each slot belongs to its writer (a hub's board does, a
store does not). Reports of steps have to be consistent: no two sites are more than one step apart,
and all with the greatest count publish a digest of the result. Otherwise no site takes a result or
goes on, and all say who contradicts whom.

The agreement is a generator: it yields requests to the board and is sent the answers. So the model
of the protocol (`outergrad_lab.checking`) runs this very code on a board of its own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outergrad.comm.failure_report import FailureReport
from outergrad.commit.board_requests import Asking, Farewell, First, Get, Gone, Put, Rest, Slot
from outergrad.commit.lost import FAREWELL_S, Findings, awaited_by, lost_of, told_by
from outergrad.commit.membership_record import GOING_ON, MembershipRecord
from outergrad.core.errors import BoardGoneError

ANSWERS_S = 2.0
"""Seconds to wait for the report of a site: a live site has a thread that leaves it."""
STEP_S = 30.0
"""Seconds to wait for the result of a step, and for the others to confirm that they have it."""
STAYS_S = 2.0
"""Seconds that the site with the store waits until the others have read."""
_DIGITS = 20
GIVEN_UP, THERE, NOWHERE = "given up", "there", "nowhere"
TROUBLE = "trouble"
"""Slot that is written once some site has aborted."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of an agreement for this site.

    Attributes:
        findings: what is known about the lost sites and the step.
        content: packed result of a step that this site has still to apply; None if there is none.
        goes_on: sites that go on without the others, this one included; None if none do.
    """

    findings: Findings
    content: Any = None
    goes_on: MembershipRecord | None = None


def word_slot(site: int) -> str:
    """Slot of a site's failure report, or of `GIVEN_UP` written by another site."""
    return f"word {site}"


def digest_of(content: bytes) -> str:
    """SHA-256 digest of the packed result of a step."""
    return hashlib.sha256(content).hexdigest()


def _brought_slot(goal: int, site: int) -> str:
    """Slot of a site's digest of a step result, whose bytes are under `_step_key`."""
    return f"brought {goal} {site}"


def _number(said: str) -> int:
    """Parses the final step count that a site confirmed; -1 if it is no number."""
    return int(said) if said.isdecimal() and len(said) < _DIGITS else -1


def _step_key(goal: int, site: int) -> str:
    return f"step {goal} {site}"


class Agreement:
    """Agreement of one site with the others that are left.

    Args:
        rank: rank of this site.
        sites: number of sites.
        host: site with which the board ends, if any.
        patience_s: seconds that a message may take (T).
        word: failure report of this site.
        kept: returns the result of the step that leads to a step count; None if unknown.
        clock: returns the time in seconds.
        on_left: called once the report is written: from then on others may notice the failure.
        min_sites: sites that must be left to go on without others; None if sites never do.
        digest: returns the digest of a step result.
    """

    def __init__(
        self,
        rank: int,
        sites: int,
        host: int | None,
        patience_s: float,
        word: FailureReport,
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
        """Runs the agreement."""
        made, words, numbers, confirmed = (
            self._word.made,
            dict[int, FailureReport](),
            {},
            set[int](),
        )
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
            ended = {site for site, one in words.items() if one.ended}  # these confirm nothing
            asked = set(words) - {self._rank} - ended
            said = yield from self._confirmed(asked)
            confirmed = {site for site in ended if words[site].made == made} | said.keys()
            numbers |= {site: _number(text) for site, text in said.items()}
            if lacks and not liars:  # sites publish their digest before they confirm
                liars = self._liars(words, (yield from self._said_of(goal, ahead)))
            if not liars:
                level = {site for site, number in said.items() if number == str(made)}
                goes_on = yield from self._going_on(words, {self._rank, *level}, made)
            words = {**words, **(yield from self._reasons(words))}
            yield from self._leave(asked)
        except BoardGoneError as error:
            self._on_left()
            if not confirmed and content is None:
                return Outcome(self._alone(str(error)))
        if liars:
            return Outcome(self._deceived(words, liars))
        return Outcome(self._findings(words, numbers, made, confirmed), content, goes_on)

    # -- board requests ---------------------------------------------------------------------------

    def _words(self) -> Asking[dict[int, FailureReport]]:
        """Leaves this site's report; returns those of all sites not given up, the same on all."""
        yield First(word_slot(self._rank), self._word.text())
        yield First(TROUBLE, str(self._rank))
        self._on_left()
        found, until = dict[int, FailureReport](), self._clock() + min(ANSWERS_S, self._patience_s)
        for site in (self._rank, *self._others):
            word = yield from self._word_of(site, until)
            if word is not None:
                found[site] = word
        return found

    def _word_of(self, site: int, until: float) -> Asking[FailureReport | None]:
        """Returns the report of a site; gives it up and returns None if none comes in time."""
        while True:
            gone = self._min_sites is not None and (yield Gone(site))
            text = yield Slot(word_slot(site))
            if text is None and site != self._rank:
                text = yield Farewell(site)
                farewell = None if text is None else FailureReport.of(text)
                if text is not None and farewell is not None and not farewell.goes_on:
                    # Copied to the slot: the farewell may change before other sites read it.
                    text = yield First(word_slot(site), text)
                else:
                    text = None
            if text is None and (gone or self._clock() >= until):
                text = yield First(word_slot(site), GIVEN_UP)
            if text is not None:
                return None if text == GIVEN_UP else FailureReport.of(text)
            yield Rest(until)

    @property
    def _step_s(self) -> float:
        return min(STEP_S, self._patience_s)

    def _forwarded(
        self, goal: int, ahead: Sequence[int], wait_s: float
    ) -> Asking[tuple[bool, Any]]:
        """Publishes or fetches the result of the step that leads to the goal.

        Args:
            goal: step count that includes this step.
            ahead: sites that have made the step.
            wait_s: seconds to wait for the result.

        Returns:
            Whether the sites that lack the result can have it, and the result.
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
        # The first text in this slot decides for all sites.
        way = yield First(f"way to {goal}", NOWHERE)
        for site in ahead if way == THERE else ():
            digest = yield Slot(_brought_slot(goal, site))
            found = None if digest is None else (yield Get(_step_key(goal, site)))
            if found is not None and self._digest(found) == digest:
                return True, found
        return False, None

    def _said_of(self, goal: int, ahead: Sequence[int]) -> Asking[dict[int, str]]:
        found = dict[int, str]()
        for site in ahead:
            if (digest := (yield Slot(_brought_slot(goal, site)))) is not None:
                found[site] = digest
        return found

    def _confirmed(self, sites: set[int]) -> Asking[dict[int, str]]:
        """Returns the final step counts that sites have confirmed, as text."""
        until, found = self._clock() + self._step_s, dict[int, str]()
        for site in sites:
            while (text := (yield Slot(f"made {site}"))) is None and self._clock() < until:
                yield Rest(until)
            if text is not None:
                found[site] = text
        return found

    def _going_on(
        self, words: Mapping[int, FailureReport], level: set[int], made: int
    ) -> Asking[MembershipRecord | None]:
        """Returns the sites that go on without others, as the first site to get here proposed.

        Args:
            words: reports of all sites that were not given up.
            level: sites that have made as many steps as this one.
            made: number of steps that this site has made.
        """
        if self._min_sites is None or self._rank not in words:
            return None
        lost = self._lost_as_seen_by(None, words, set(self._others) - words.keys())
        left = sorted(level - set(lost))
        if not lost or len(left) < self._min_sites or self._rank not in left:
            return None
        text = yield First(GOING_ON, MembershipRecord.proposed(made, left))
        return MembershipRecord.of(text, self._rank, made)

    def _reasons(self, words: Mapping[int, FailureReport]) -> Asking[dict[int, FailureReport]]:
        """Reads why sites closed connections before they ended: they say so a little later."""
        until, found = self._clock() + FAREWELL_S, dict[int, FailureReport]()
        for site in set(self._word.gone) & words.keys():
            word = words[site]
            if word.silent or word.gone or word.timed_out or word.why or word.ended:
                continue
            while (text := (yield Farewell(site))) is None and self._clock() < until:
                yield Rest(until)
            farewell = None if text is None else FailureReport.of(text)
            if farewell is not None and not farewell.goes_on:
                found[site] = replace(word, ended=farewell.ended, why=farewell.why)
        return found

    def _leave(self, others: set[int]) -> Asking[None]:
        """Lets the host go last, because the board ends with it."""
        yield First(f"read by {self._rank}", "all")
        until = self._clock() + STAYS_S
        for site in others if self._rank == self._host else ():
            while (yield Slot(f"read by {site}")) is None and self._clock() < until:
                yield Rest(until)

    # -- conclusions ------------------------------------------------------------------------------

    def _findings(
        self,
        words: Mapping[int, FailureReport],
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

    def _liars(self, words: Mapping[int, FailureReport], said: Mapping[int, str]) -> set[int]:
        """Returns the sites that contradict others: as far as can be told, those that lie.

        Args:
            words: reports of all sites that were not given up.
            said: digests that the sites ahead published of the result of the last step.
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

    def _deceived(self, words: Mapping[int, FailureReport], liars: set[int]) -> Findings:
        """Findings if reports are inconsistent: no site can know how far the others are."""
        who = tuple(sorted(liars))
        whose = "site told of its" if len(who) == 1 else "sites told of their"
        doubt = f"the lost {whose} steps what cannot be"
        others = {site: one for site, one in words.items() if site != self._rank}
        return Findings(
            lost=who,
            certain=False,
            may_differ=tuple(self._others),
            told=told_by(others),
            doubt=doubt,
        )

    def _lost(self, words: Mapping[int, FailureReport], unknown: set[int]) -> tuple[int, ...]:
        if words and self._rank not in words:  # the others gave this site up
            return tuple(self._others)
        return self._lost_as_seen_by(self._rank, {**words, self._rank: self._word}, unknown)

    @staticmethod
    def _lost_as_seen_by(
        rank: int | None, words: Mapping[int, FailureReport], unknown: set[int]
    ) -> tuple[int, ...]:
        """Returns the lost sites; one that ended in order is to blame only if no other is."""
        own, known = -1 if rank is None else rank, dict(words)
        in_order = {s: replace(one, ended="") for s, one in words.items() if one.ended == "session"}
        return lost_of(own, known | in_order, unknown) or lost_of(own, known, unknown)

    def _alone(self, doubt: str) -> Findings:
        """Findings if the board is gone, for a reason in words: the others tell nothing more."""
        suspects = tuple(sorted({*self._word.gone, *self._word.silent}))
        return Findings(
            lost=suspects if self._host in (None, self._rank) else (self._host,),
            certain=not self._word.sent,
            may_differ=tuple(self._others),
            doubt=doubt,
        )
