from __future__ import annotations

from dataclasses import replace

import pytest
import typer

from covering import LONG
from outergrad.commit import lost, machine
from outergrad.commit.machine import (
    Action,
    CommitState,
    Event,
    EventRefusedError,
    JoinState,
    KeptState,
)
from outergrad_lab.checking.committing import CommittingSite
from outergrad_lab.checking.exploring import drawn, execute, explore, kinds, shrunk
from outergrad_lab.checking.judging import Verdict, judge
from outergrad_lab.checking.network import Store
from outergrad_lab.checking.site import MESSAGES, Ending
from outergrad_lab.checking.trial import Fault, Trial, draw, simpler
from outergrad_lab.checking.votes import VotingSite
from outergrad_lab.commands.check_commit import check_commit


def test_the_commit_machine_keeps_its_promises():
    count = 5000 if LONG else 1000
    found = explore(CommittingSite, range(count))
    assert found.wrong == {}
    assert found.lost > 0.4 * count  # the faults are felt


def test_half_of_the_trials_change_the_membership():
    trials = [drawn(seed, CommittingSite) for seed in range(200)]
    members = [trial for trial in trials if trial.min_sites is not None]
    assert 70 < len(members) < 130
    assert any(trial.comes for trial in members)
    assert any(trial.waits for trial in members)
    assert any(len(trial.gone) > 1 for trial in members)


def test_votes_can_differ_silently_after_a_reset():
    """A known weakness of the library: a site that was slow to look applies what others do not."""
    trial = shrunk(draw(1354), VotingSite, "silent")
    assert [fault.kind for fault in trial.faults] == ["reset"]
    verdict, lines = execute(trial, VotingSite, traced=True)
    assert "silent" in kinds(verdict)
    assert any("reset" in line for line in lines)
    assert not execute(trial, CommittingSite)[0].wrong


def quiet(seed: int) -> Trial:
    """A trial without a fault, in which a site joins, sooner or later."""
    votes = {"every": (1, 2, 16)[seed % 3], "waits": (0, 0, 2)[seed % 3]}
    return Trial(seed, 2 + seed % 3, 4, min_sites=1, comes=(0.05 * (seed % 12),), **votes)


def test_nobody_is_lost_where_nothing_happens():
    for seed in range(50):
        trial = Trial(seed, sites=2 + seed % 3, steps=3, waits=seed % 2)
        done = judge(trial, [Ending(3, done=True)] * trial.sites)
        assert execute(trial, CommittingSite)[0] == done
        assert execute(quiet(seed), CommittingSite)[0] == Verdict()


def test_sites_that_differ_are_seen():
    trial = Trial(0, sites=2, steps=3)
    silent = judge(trial, [Ending(3, done=True), Ending(2, lost=(0,))])
    assert kinds(silent) == {"silent", "unsettled"}
    trial = Trial(0, sites=2, steps=3, faults=(Fault("pause", 1),))
    warned = Ending(2, lost=(0,), certain=False, may_differ=(0,))
    ahead = Ending(3, lost=(1,), may_differ=(1,))
    said = judge(trial, [ahead, warned])
    assert said == Verdict(doubted=True, lost=True)
    assert kinds(judge(Trial(0, sites=2, steps=3), [ahead, warned])) == {"withheld", "name"}


def test_a_site_that_is_named_wrongly_is_seen():
    """Except where both sites are in the next sum when a third one gives up."""
    trial = Trial(0, 3, 2, sums=True, faults=(Fault("pause", 2, for_s=1.1),))
    brief = replace(trial, faults=(Fault("pause", 2, for_s=0.3),))
    endings = [Ending(made, lost=lost) for made, lost in ((1, (1,)), (1, (2,)), (1, (2,)))]
    first = [replace(one, applied=0) for one in endings]
    several = [replace(endings[0], lost=(1, 2)), *endings[1:]]
    assert not judge(trial, endings).wrong
    for other in (replace(trial, sums=False), brief):
        assert kinds(judge(other, endings)) == {"name"}
    assert kinds(judge(trial, first)) == kinds(judge(trial, several)) == {"name"}


def names_in_sums() -> bool:
    """True if a site is named wrongly where another stands still in a sum."""
    paused = [Fault("pause", 2, turn=1 + seed % 24, for_s=1.1) for seed in range(100)]
    trials = [Trial(seed, 3, 2, sums=True, faults=(one,)) for seed, one in enumerate(paused)]
    return any("name" in kinds(execute(trial, CommittingSite)[0]) for trial in trials)


def test_the_checker_finds_a_wrong_name(monkeypatch):
    def most_patient(found):
        return {max(found, key=lambda site: found[site].waited_s)}

    assert not names_in_sums()
    monkeypatch.setattr(lost, "_late_in_sum", most_patient)
    assert names_in_sums()


def test_the_store_may_end_once_all_farewells_are_read():
    """Site 0 holds it, and ends while a vote of site 2 to site 1 is still on its way."""
    assert not execute(drawn(20034727, CommittingSite), CommittingSite)[0].wrong


def test_who_has_waited_for_the_late_part_of_a_sum_is_not_late():
    assert not execute(drawn(20015058, CommittingSite), CommittingSite)[0].wrong


class AppliesAtOnce(CommittingSite):
    """Does not wait for the messages of all."""

    def receive_all(self, lane):
        came = yield from super().receive_all(lane)
        return dict(list(came.items())[1:]) if lane == MESSAGES else came


class PassesOnNothing(CommittingSite):
    """Gives nobody a step that it has made."""

    def _result(self, made):
        return None


@pytest.mark.parametrize("protocol", [AppliesAtOnce, PassesOnNothing])
def test_the_checker_finds_what_is_broken(protocol):
    assert explore(protocol, range(500)).wrong


S, J, K, E, A = CommitState, JoinState, KeptState, Event, Action
BROKEN = {
    "a frozen site makes steps": ("SITE", S.FROZEN, E.MADE, S.FROZEN, ()),
    "a site forgets that others may make the step": ("SITE", S.OPEN, E.SENDS, S.OPEN, ()),
    "a site hears of trouble and does nothing": ("SITE", S.OPEN, E.FAILED, S.FROZEN, ()),
    "a site keeps what nobody agreed on": ("SITE", S.FROZEN, E.AGREED, S.LOST, ()),
    "a result is not kept": ("KEPT", K.SETTLED, E.MADE, K.KEPT, ()),
    "nobody waits for the last step": ("KEPT", K.KEPT, E.SETTLES, K.SETTLED, (A.DROP,)),
    "votes are not counted": ("KEPT", K.CAST, E.ARRIVED, K.SETTLED, (A.DROP,)),
    "a step is forgotten too late": ("KEPT", K.KEPT, E.ARRIVED, K.KEPT, ()),
    "a site that told its count makes more": ("JOIN", J.TOLD, E.MADE, J.TOLD, ()),
    "a site does not wait for the counts": ("JOIN", J.PAUSED, E.BEGINS, J.PAUSED, ()),
    "nobody lets the others in": ("JOIN", J.DUE, E.BEGINS, J.DUE, ()),
    "the others join too soon": ("JOIN", J.TOLD, E.SET, J.DUE, ()),
}


def is_found(seeds: range) -> bool:
    """True if an execution breaks a promise, loses a site without a fault, or is refused."""
    try:
        for seed in seeds:
            verdict = execute(quiet(seed), CommittingSite)[0]
            if verdict.wrong or verdict.lost:
                return True
            if execute(drawn(seed, CommittingSite), CommittingSite)[0].wrong:
                return True
    except EventRefusedError:
        return True
    return False


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_the_checker_finds_a_wrong_transition(monkeypatch, broken):
    table, state, event, after, actions = broken
    assert (state, event) in getattr(machine, table)
    monkeypatch.setitem(getattr(machine, table), (state, event), (after, actions))
    assert is_found(range(400))


class LeavesFirst(CommittingSite):
    """Does not stay until the others have read, though the store ends with it."""

    stays = False


def test_who_holds_the_store_must_go_last():
    trials = [Trial(seed, sites=3, steps=2, host=0) for seed in range(100)]
    found = {kind for trial in trials for kind in kinds(execute(trial, LeavesFirst)[0])}
    assert found == {"uncompared"}
    assert not any(execute(trial, CommittingSite)[0].wrong for trial in trials)


def test_words_that_are_written_over_make_no_site_silent(monkeypatch):
    """Sites may end apart then, but know it: they compare what all have said in the end."""

    def overwrite(store, key, value):
        store.set(key, value)
        return value

    monkeypatch.setattr(Store, "set_first", overwrite)
    trials = [draw(seed) for seed in range(100)]
    found = {kind for trial in trials for kind in kinds(execute(trial, CommittingSite)[0])}
    assert found <= {"withheld"}


def test_an_execution_follows_from_its_seed():
    assert execute(draw(76), VotingSite, traced=True) == execute(draw(76), VotingSite, traced=True)


def test_simpler_trials_have_less_in_them():
    fault = Fault("kill", 1, turn=3)
    trial = Trial(0, 3, 2, sums=True, faults=(fault, Fault("reset", 0, 2, turn=9)))
    assert {len(less.faults) for less in simpler(trial)} == {1, 2}
    assert trial not in simpler(trial)


def test_the_command_ends_with_1_where_a_promise_is_broken(capsys):
    check_commit(executions=100, protocol="commit")
    assert "none" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        check_commit(executions=5, seed=1352, protocol="votes")
    assert "silent" in capsys.readouterr().out


def test_the_command_prints_an_execution(capsys):
    check_commit(seed=1354, protocol="votes", trace=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("votes: 4 sites")
    assert lines[-1].startswith("silent: site")


def test_a_protocol_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        check_commit(protocol="paxos")
    assert "no protocol 'paxos'" in capsys.readouterr().err
