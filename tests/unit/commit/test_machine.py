"""The commit machine: what it allows, and what it refuses."""

from __future__ import annotations

import pytest

from outergrad.commit.machine import (
    EVERY,
    IS_OVER,
    JOIN,
    KEPT,
    SITE,
    Action,
    CommitMachine,
    CommitState,
    Event,
    EventRefusedError,
    JoinState,
    KeptState,
    KeptStep,
    must_look,
)


@pytest.mark.parametrize(
    ("table", "states", "first"),
    [(SITE, CommitState, "OPEN"), (JOIN, JoinState, "STEADY"), (KEPT, KeptState, "SETTLED")],
)
def test_every_state_can_be_reached_and_is_left_to_known_states(table, states, first):
    reached, found = set(), {states[first]}
    while found - reached:
        reached |= found
        found = {after for (state, _), (after, _) in table.items() if state in reached}
    assert reached == set(states)


def test_a_frozen_site_makes_nothing():
    machine = CommitMachine()
    assert machine.on(Event.FAILED) == (Action.AGREE,)
    for ends in (Event.PARTED, None):
        assert machine.on(Event.SENDS) == (Action.RAISE,)
        assert machine.make() == (Action.RAISE,)
        assert machine.made == 0
        assert machine.on(Event.FAILED) == (Action.AWAIT,)
        assert machine.state in IS_OVER
        if ends is not None:
            machine.on(ends)


def test_an_event_that_a_state_does_not_allow_is_refused():
    with pytest.raises(EventRefusedError, match="OPEN there is no event AGREED"):
        CommitMachine().on(Event.AGREED)
    kept = KeptStep()
    kept.on(Event.DECIDED)
    with pytest.raises(EventRefusedError, match="DECIDED there is no event VOTED"):
        kept.make()


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_site_makes_one_more_step_until_all_have_told(more):
    """Then as many as the site that is ahead has begun, and no more."""
    machine = CommitMachine()
    for _ in range(5):
        machine.make()
    assert [machine.come(), machine.begin(), machine.make(), machine.come()] == [5, (), (), 5]
    assert machine.begin() == (Action.PAUSE,)
    machine.set_join(5 + more)
    for _ in range(more):
        assert machine.begin() == ()
        machine.make()
    assert machine.begin() == (Action.JOIN,)
    assert machine.made == 6 + more
    with pytest.raises(EventRefusedError):
        machine.make()


def test_sites_vote_on_the_first_step_and_on_every_sixteenth_behind_it():
    kept, cast = KeptStep(), list[bool]()
    for _ in range(2 * EVERY + 1):
        cast.append(Action.CAST in kept.make())
        if Action.COUNT in kept.on(Event.ARRIVED):
            assert kept.on(Event.COUNTED) == (Action.DROP,)
    assert [k for k, is_cast in enumerate(cast) if is_cast] == [0, EVERY, 2 * EVERY]


def test_a_step_is_kept_until_all_have_made_it():
    kept = KeptStep(every=1)
    kept.restart()
    assert kept.make() == (Action.KEEP, Action.CAST)
    assert kept.on(Event.SETTLES) == (Action.COUNT,)
    assert kept.on(Event.ENDED) == (Action.COMPARE,)
    assert kept.state is KeptState.COMPARING
    assert kept.on(Event.COMPARED) == (Action.DROP,)
    assert kept.on(Event.SETTLES) == ()


def test_others_may_ask_for_the_step_under_way_and_for_the_last_one():
    machine = CommitMachine()
    machine.make()
    assert [machine.knows(made) for made in (-1, 0, 1, 2)] == [None, False, True, None]


def test_a_site_that_took_long_looks_at_the_board():
    assert must_look(2.0, 4.0)
    assert not must_look(1.9, 4.0)


@pytest.mark.parametrize("last", [Event.MADE, Event.VOTED, Event.DECIDED])
@pytest.mark.parametrize("while_", [Event.ARRIVED, Event.SETTLES])
def test_training_goes_on_after_an_interrupt_while_the_last_step_is_settled(last, while_):
    """Somebody stops a cell of a notebook that waits for other sites, and runs the next one."""
    kept = KeptStep()
    kept.on(last)
    kept.on(while_)  # what it asks for is never finished
    if Action.COUNT in kept.on(Event.ARRIVED):
        kept.on(Event.COUNTED)
    assert kept.state is KeptState.SETTLED
    assert Action.KEEP in kept.make()
