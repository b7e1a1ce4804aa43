from __future__ import annotations

import pytest
import typer

from covering import LONG
from outergrad_lab.checking.exploring import execute, explore, kinds, shrunk
from outergrad_lab.checking.forwarding import ForwardingSite
from outergrad_lab.checking.implying import ImplyingSite
from outergrad_lab.checking.judging import Verdict, judge
from outergrad_lab.checking.network import Store
from outergrad_lab.checking.site import Ending
from outergrad_lab.checking.trial import Fault, Trial, draw, simpler
from outergrad_lab.checking.votes import VotingSite
from outergrad_lab.commands.check_commit import check_commit


@pytest.mark.parametrize("protocol", [ForwardingSite, ImplyingSite])
def test_a_step_that_is_kept_needs_no_votes(protocol):
    count = 5000 if LONG else 1000
    found = explore(protocol, range(count))
    assert found.wrong == {}
    assert found.lost > 0.4 * count  # the faults are felt


def test_votes_can_differ_silently_after_a_reset():
    """A known weakness of the library: a site that was slow to look applies what others do not."""
    trial = shrunk(draw(1354), VotingSite, "silent")
    assert [fault.kind for fault in trial.faults] == ["reset"]
    verdict, lines = execute(trial, VotingSite, traced=True)
    assert "silent" in kinds(verdict)
    assert any("reset" in line for line in lines)
    assert not execute(trial, ForwardingSite)[0].wrong


def test_nobody_is_lost_where_nothing_happens():
    for seed in range(50):
        trial = Trial(seed, sites=2 + seed % 3, steps=3)
        done = judge(trial, [Ending(3, done=True)] * trial.sites)
        assert execute(trial, ForwardingSite)[0] == done


def test_sites_that_differ_are_seen():
    trial = Trial(0, sites=2, steps=3)
    silent = judge(trial, [Ending(3, done=True), Ending(2, lost=(0,))])
    assert kinds(silent) == {"silent"}
    warned = Ending(2, lost=(0,), certain=False, may_differ=(0,))
    said = judge(trial, [Ending(3, done=True), warned])
    assert said == Verdict(doubted=True, lost=True)


class MembershipRecord(ForwardingSite):
    """Applies a step although its word is that it has not."""

    _frozen = property(lambda self: False, lambda self, value: None)


class AppliesAtOnce(ForwardingSite):
    """Does not wait for the messages of all."""

    def receive_all(self, lane):
        came = yield from super().receive_all(lane)
        return dict(list(came.items())[1:])


@pytest.mark.parametrize("protocol", [MembershipRecord, AppliesAtOnce])
def test_the_checker_finds_what_is_broken(protocol):
    assert explore(protocol, range(500)).wrong


class LeavesFirst(ImplyingSite):
    """Does not stay until the others have read, though the store ends with it."""

    def _stay_for_readers(self):
        yield from ()


def test_who_holds_the_store_must_go_last():
    trials = [Trial(seed, sites=3, steps=1, host=0) for seed in range(200)]
    found = {kind for trial in trials for kind in kinds(execute(trial, LeavesFirst)[0])}
    assert found == {"uncompared"}
    assert not any(execute(trial, ImplyingSite)[0].wrong for trial in trials)


def test_words_that_are_written_over_make_no_site_silent(monkeypatch):
    """Sites may end apart then, but know it: they compare what all have said in the end."""

    def overwrite(store, key, value):
        store.set(key, value)
        return value

    monkeypatch.setattr(Store, "set_first", overwrite)
    assert not explore(ForwardingSite, range(100)).wrong


def test_an_execution_follows_from_its_seed():
    assert execute(draw(76), VotingSite, traced=True) == execute(draw(76), VotingSite, traced=True)


def test_simpler_trials_have_less_in_them():
    fault = Fault("kill", 1, turn=3)
    trial = Trial(0, 3, 2, sums=True, faults=(fault, Fault("reset", 0, 2, turn=9)))
    assert {len(less.faults) for less in simpler(trial)} == {1, 2}
    assert trial not in simpler(trial)


def test_the_command_ends_with_1_where_a_promise_is_broken(capsys):
    check_commit(executions=100, protocol="retain-and-forward")
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
