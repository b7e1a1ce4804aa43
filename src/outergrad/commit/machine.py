"""The commit machine: which steps a site may make, keep and forget; events in, actions out.

It is pure: no clock, no network, no tensors. The library performs its actions, and so does
`outergrad check-commit` in a simulated world. It has three tables of transitions:

- `SITE`: whether a site may make the next step of its transport (`CommitState`).
- `JOIN`: the barrier before which other sites join (`JoinState`).
- `KEPT`: for each session, whether others may still ask for its last step (`KeptState`).

Events of `SITE` and `JOIN` come from `CommitParticipant`, those of `KEPT` from `DeferredVotes`.
What a site says of a step, its `Verdict`, is in its vote: the worst of all sites decides whether
the step counts (`Ballot`), and the machine is told `DECIDED`. Without votes a step counts once all
its messages have arrived, as the plan lets no site refuse it then. Where a site is lost, the sites
that are left agree on the greatest step that one of them has made (`Agreement`).

An event that a state has no row for is a mistake of the caller, and refused. A row with `RAISE` is
none: the caller has to learn that the other sites gave up.
"""

from __future__ import annotations

from enum import Enum
from typing import NoReturn, TypeVar

EVERY = 16
"""Steps per vote. One in each would cost small models a tenth of it: it wakes gloo's threads."""


class CommitState(str, Enum):
    """State of a site on its transport, for the steps of all sessions."""

    OPEN = "open"
    """No other site can have made more steps than this one."""
    SENT = "sent"
    """Others have all that they need of this site, and may have made the next step."""
    FROZEN = "frozen"
    """It makes no step but the one on which the sites that are left agree."""
    LOST = "lost"
    """They have agreed, and this site goes on with nobody."""
    MOVING = "moving"
    """They have agreed, and this site goes on with other members."""


class JoinState(str, Enum):
    """State of the barrier before which other sites join."""

    STEADY = "steady"
    """No site waits."""
    TOLD = "told"
    """This site has told its step count, and makes one more step at most."""
    PAUSED = "paused"
    """It has made that step, and waits for the others to tell their counts."""
    SET = "set"
    """The join step is agreed, and some steps before it."""
    DUE = "due"
    """All steps before it are made: the others join now."""


class KeptState(str, Enum):
    """State of the last step of a session."""

    SETTLED = "settled"
    """All sites are known to have made it: nobody will ask for it."""
    KEPT = "kept"
    """Applied without a vote: others may lack it."""
    CAST = "cast"
    """Applied; this site's vote is on its way, and the others' are not counted."""
    COUNTING = "counting"
    """The votes on it are waited for."""
    DECIDED = "decided"
    """All have voted for it; others may still wait for a vote on it."""
    COMPARING = "comparing"
    """Digests of what each site received are waited for."""


class Event(str, Enum):
    """Event at a site."""

    SENDS = "sends the last message"
    MADE = "step made"
    FAILED = "exchange failed, or board says trouble"
    JOINS = "join step reached"
    PARTED = "agreed that nobody goes on"
    AGREED = "agreed with whom to go on"
    COME = "others wait to join"
    SET = "join step agreed"
    REACHED = "step before the join made"
    BEGINS = "step is to begin"
    VOTED = "step made, with a vote"
    DECIDED = "step made, all voted for it"
    ARRIVED = "next step's messages have arrived"
    COUNTED = "votes counted"
    ENDED = "voters have ended in order"
    SETTLES = "final barrier reached"
    MEETS = "members are about to change"
    COMPARED = "all have made it"
    FORGETS = "outcome agreed, or replicas made equal"


class Action(str, Enum):
    """Action to be performed because of an event."""

    RAISE = "raise: the others gave up"
    AGREE = "run the agreement"
    AWAIT = "wait for the outcome"
    PROPOSE = "propose the new members"
    MOVE = "open the new membership"
    TELL = "tell the step count"
    PAUSE = "wait until the join step is agreed"
    JOIN = "settle with all, then join"
    KEEP = "keep the result"
    CAST = "cast a vote"
    COUNT = "count the votes"
    COMPARE = "compare digests on the board"
    DROP = "drop the result"


class EventRefusedError(AssertionError):
    """An event came in a state that does not allow it."""

    def __init__(self, state: Enum, event: Event) -> None:
        super().__init__(f"in the state {state.name} there is no event {event.name}")


StateT = TypeVar("StateT", bound=Enum)


class Table(dict[tuple[StateT, Event], tuple[StateT, tuple[Action, ...]]]):
    """Transitions: (state, event) -> (next state, actions). Others are refused."""

    def __missing__(self, key: tuple[StateT, Event]) -> NoReturn:
        """Refuses an event.

        Raises:
            EventRefusedError: the state does not allow the event.
        """
        raise EventRefusedError(*key)


_S, _J, _K, _E, _A = CommitState, JoinState, KeptState, Event, Action
IS_OVER = (_S.FROZEN, _S.LOST, _S.MOVING)
"""States in which a site makes no more steps on its transport."""


# fmt: off
SITE = Table({
    (_S.OPEN,   _E.SENDS):  (_S.SENT,   ()),
    (_S.SENT,   _E.SENDS):  (_S.SENT,   ()),  # once more, after a surprise
    (_S.OPEN,   _E.MADE):   (_S.OPEN,   ()),
    (_S.SENT,   _E.MADE):   (_S.OPEN,   ()),
    (_S.OPEN,   _E.FAILED): (_S.FROZEN, (_A.AGREE,)),
    (_S.SENT,   _E.FAILED): (_S.FROZEN, (_A.AGREE,)),
    (_S.OPEN,   _E.JOINS):  (_S.FROZEN, (_A.PROPOSE,)),
    (_S.SENT,   _E.JOINS):  (_S.FROZEN, (_A.PROPOSE,)),
    (_S.FROZEN, _E.PARTED): (_S.LOST,   ()),
    (_S.FROZEN, _E.AGREED): (_S.MOVING, (_A.MOVE,)),
    **{(state,  _E.FAILED): (state,     (_A.AWAIT,)) for state in IS_OVER},
    **{(state,  event):     (state,     (_A.RAISE,))
       for state in IS_OVER for event in (_E.SENDS, _E.MADE, _E.JOINS)},
})
"""Transitions of a site: (state, event) -> (next state, actions)."""

JOIN = Table({
    (_J.STEADY, _E.COME):    (_J.TOLD,   (_A.TELL,)),
    (_J.STEADY, _E.MADE):    (_J.STEADY, ()),
    (_J.STEADY, _E.BEGINS):  (_J.STEADY, ()),
    (_J.TOLD,   _E.COME):    (_J.TOLD,   (_A.TELL,)),
    (_J.TOLD,   _E.MADE):    (_J.PAUSED, ()),
    (_J.TOLD,   _E.BEGINS):  (_J.TOLD,   ()),
    (_J.TOLD,   _E.SET):     (_J.SET,    ()),
    (_J.PAUSED, _E.COME):    (_J.PAUSED, (_A.TELL,)),
    (_J.PAUSED, _E.MADE):    (_J.PAUSED, ()),  # in a joined loop without a batch nothing pauses
    (_J.PAUSED, _E.BEGINS):  (_J.PAUSED, (_A.PAUSE,)),
    (_J.PAUSED, _E.SET):     (_J.SET,    ()),
    (_J.PAUSED, _E.REACHED): (_J.DUE,    ()),
    (_J.SET,    _E.MADE):    (_J.SET,    ()),
    (_J.SET,    _E.BEGINS):  (_J.SET,    ()),
    (_J.SET,    _E.REACHED): (_J.DUE,    ()),
    (_J.SET,    _E.COME):    (_J.SET,    (_A.TELL,)),  # once more, if a lying site names nobody
    (_J.DUE,    _E.COME):    (_J.DUE,    (_A.TELL,)),
    (_J.SET,    _E.SET):     (_J.SET,    ()),
    (_J.DUE,    _E.SET):     (_J.DUE,    ()),
    (_J.DUE,    _E.BEGINS):  (_J.DUE,    (_A.JOIN,)),
})
"""Transitions of the join barrier."""

KEPT = Table({
    (_K.SETTLED,   _E.MADE):     (_K.KEPT,      (_A.KEEP,)),
    (_K.SETTLED,   _E.VOTED):    (_K.CAST,      (_A.KEEP, _A.CAST)),
    (_K.SETTLED,   _E.DECIDED):  (_K.DECIDED,   ()),
    (_K.SETTLED,   _E.ARRIVED):  (_K.SETTLED,   ()),
    (_K.KEPT,      _E.ARRIVED):  (_K.SETTLED,   (_A.DROP,)),
    (_K.CAST,      _E.ARRIVED):  (_K.COUNTING,  (_A.COUNT,)),
    (_K.DECIDED,   _E.ARRIVED):  (_K.SETTLED,   (_A.DROP,)),
    (_K.COUNTING,  _E.ARRIVED):  (_K.COUNTING,  (_A.COUNT,)),  # once more, after an interrupt
    (_K.COMPARING, _E.ARRIVED):  (_K.SETTLED,   (_A.DROP,)),  # an interrupt ended the comparison
    (_K.COUNTING,  _E.COUNTED):  (_K.SETTLED,   (_A.DROP,)),
    (_K.COUNTING,  _E.ENDED):    (_K.COMPARING, (_A.COMPARE,)),
    (_K.SETTLED,   _E.SETTLES):  (_K.SETTLED,   ()),
    (_K.KEPT,      _E.SETTLES):  (_K.COMPARING, (_A.COMPARE,)),
    (_K.CAST,      _E.SETTLES):  (_K.COUNTING,  (_A.COUNT,)),
    (_K.COUNTING,  _E.SETTLES):  (_K.COUNTING,  (_A.COUNT,)),  # once more, after an error
    (_K.DECIDED,   _E.SETTLES):  (_K.COMPARING, (_A.COMPARE,)),
    (_K.COMPARING, _E.SETTLES):  (_K.COMPARING, (_A.COMPARE,)),  # once more, after an error
    (_K.SETTLED,   _E.MEETS):    (_K.COMPARING, (_A.COMPARE,)),
    (_K.COMPARING, _E.MEETS):    (_K.COMPARING, (_A.COMPARE,)),  # once more, after an interrupt
    (_K.COMPARING, _E.ENDED):    (_K.COMPARING, (_A.COMPARE,)),  # once more, by their farewells
    (_K.COMPARING, _E.COMPARED): (_K.SETTLED,   (_A.DROP,)),
    **{(state,     _E.FORGETS):  (_K.SETTLED,   (_A.DROP,)) for state in _K},
})
"""Transitions of a session's last step."""
# fmt: on


class CommitMachine:
    """State of a site on its transport.

    Attributes:
        state: whether it may make the next step.
        join: how far the barrier is before which others join.
        made: number of steps that have ended, of all sessions.
    """

    def __init__(self) -> None:
        self.state, self.join, self.made = CommitState.OPEN, JoinState.STEADY, 0
        self._told = self._joins_at = 0

    def on(self, event: Event) -> tuple[Action, ...]:
        """Goes through a transition of `SITE`; returns the actions.

        Raises:
            EventRefusedError: the state does not allow the event.
        """
        self.state, actions = SITE[self.state, event]
        return actions

    def make(self) -> tuple[Action, ...]:
        """Ends a step, applied or not; returns the actions: `RAISE` if it must not end."""
        actions = self.on(Event.MADE)
        if not actions:
            self.made += 1
            if self.join != JoinState.STEADY:
                is_set = self.join == JoinState.SET
                is_reached = is_set and self.made >= self._joins_at
                self._on_join(Event.REACHED if is_reached else Event.MADE)
        return actions

    def knows(self, made: int) -> bool | None:
        """Says which step another site asks about that has made `made` steps.

        Returns:
            True for the step under way, False for the last one, None for any other.
        """
        ahead = self.made - made
        return None if ahead not in (0, 1) else ahead == 0

    # -- the join barrier -------------------------------------------------------------------------
    #
    # All sites agree on the step before which others join. Each tells how many steps it has made,
    # and begins none but the next until all have told. The others join after one step more than
    # the greatest count: no site has begun more.

    def come(self) -> int:
        """Others wait to join. Returns the step count to tell, the same at each call."""
        if self.join == JoinState.STEADY:
            self._told = self.made
        self._on_join(Event.COME)
        return self._told

    def set_join(self, told: int) -> None:
        """All have told their step counts; `told` is the greatest."""
        self._joins_at = told + 1
        is_reached = self.join == JoinState.PAUSED and self.made >= self._joins_at
        self._on_join(Event.REACHED if is_reached else Event.SET)

    def begin(self) -> tuple[Action, ...]:
        """A step is to begin. Returns `PAUSE` if it must not yet, `JOIN` if others join before."""
        return () if self.state in IS_OVER else self._on_join(Event.BEGINS)

    def _on_join(self, event: Event) -> tuple[Action, ...]:
        self.join, actions = JOIN[self.join, event]
        return actions


class KeptStep:
    """State of a session's last step, and of when the sites vote.

    Args:
        every: steps per vote; `EVERY` if None.

    Attributes:
        state: whether others may still ask for the step.
        left: number of steps until the sites vote.
    """

    def __init__(self, every: int | None = None) -> None:
        self.state, self.left = KeptState.SETTLED, 0
        self._every = EVERY if every is None else every

    def on(self, event: Event) -> tuple[Action, ...]:
        """Goes through a transition of `KEPT`; returns the actions.

        Raises:
            EventRefusedError: the state does not allow the event.
        """
        self.state, actions = KEPT[self.state, event]
        return actions

    def make(self) -> tuple[Action, ...]:
        """Commits a step that nobody can refuse; returns `CAST` among the actions if votes are due.

        All sites have made the step before, or this is refused: nobody is two steps ahead.
        """
        if not self.left:
            return self.vote()
        self.left -= 1
        return self.on(Event.MADE)

    def vote(self) -> tuple[Action, ...]:
        """Commits a step that the sites vote on, or have voted on."""
        self.left = self._every - 1
        return self.on(Event.VOTED)

    def restart(self) -> tuple[Action, ...]:
        """Starts anew with sites that are equal: they vote on the next step."""
        self.left = 0
        return self.on(Event.FORGETS)


def must_look(took_s: float, patience_s: float) -> bool:
    """True if a step took so long that the others may have given up meanwhile.

    A site that was suspended has all messages in its buffers when it goes on. It looks at the board
    before it makes the step.

    Args:
        took_s: seconds since the step began.
        patience_s: seconds that a site waits for a message.
    """
    return took_s >= patience_s / 2
