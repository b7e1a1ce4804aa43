"""Who takes part in an exchange: one decision, which is the same for all sites."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.sites import sites_of
from outergrad.session import gathering
from outergrad.session.gathering import Gathering, Presence, Roll

HERE = Presence(weight=1)
ENDS = Presence(weight=1, waits_for_all=True)
SESSION = 7


class OneBoard:
    """A board in this process."""

    def __init__(self):
        self.slots, self.left = {}, set()

    def within(self, limit_s):
        assert limit_s == 10, "as long as a message may take"
        return self

    def first(self, key, text):
        return self.slots.setdefault(key, text)

    def slot(self, key):
        return self.slots.get(key)

    def farewell(self, site, session):
        assert session == SESSION
        return "ended" if site in self.left else None

    def is_gone(self, site):
        return False


@pytest.fixture
def board(monkeypatch):
    monkeypatch.setattr(gathering.time, "sleep", lambda _: None)
    return OneBoard()


def at(board, rank, least=2, grace_s=3.0, look=lambda: None, sites=3):
    """A site's gatherings, by a clock that goes on by a second whenever it is read."""
    ticks = count()
    comm = SimpleNamespace(
        rank=rank, world_size=sites, board=board, patience_s=10, sites=sites_of(sites, ())
    )
    return Gathering(comm, SESSION, "here", least, grace_s, look, lambda: float(next(ticks)))


def come(board, rank, own=HERE, number=0):
    """Another site says that it is there."""
    at(board, rank)._say(number, own)


def test_a_quorum_waits_for_late_sites_and_then_goes_ahead(board):
    looks = []
    come(board, 1)
    roll = at(board, 0, look=lambda: looks.append(None)).attend(0, HERE)
    assert roll.there.keys() == {0, 1}
    assert len(looks) > 2, "for the seconds of its grace"


def test_nobody_waits_once_all_are_there(board):
    come(board, 1), come(board, 2)
    looks = []
    roll = at(board, 0, grace_s=9.0, look=lambda: looks.append(None)).attend(0, HERE)
    assert roll.of_all
    assert len(looks) == 1


def test_who_comes_within_the_grace_takes_part(board):
    come(board, 1)
    looks = iter([None, lambda: come(board, 2)])
    roll = at(board, 0, look=lambda: (then := next(looks)) and then()).attend(0, HERE)
    assert roll.of_all


def test_the_first_decision_stands_for_all(board):
    come(board, 1)
    first = at(board, 0).attend(0, HERE)
    late, again = at(board, 2), at(board, 1)
    assert late.decided(0) == again.decided(0) == first
    assert late.attend(0, HERE) == first, "though all are there now"
    assert late.decided(1) is None


def test_a_site_that_has_no_more_steps_to_make_goes_ahead_with_all_alone(board):
    come(board, 1, ENDS)
    with pytest.raises(ExchangeError, match="site 2 did not come within") as caught:
        at(board, 0, grace_s=0.0).attend(0, ENDS)
    assert (caught.value.sites, caught.value.kind) == ((2,), Failure.TIMEOUT)
    come(board, 2, ENDS)
    assert at(board, 0).attend(0, ENDS).ends


def test_a_site_in_its_loop_goes_ahead_with_those_that_have_no_more_steps_to_make(board):
    come(board, 1, ENDS)
    roll = at(board, 0).attend(0, HERE)
    assert roll.there == {0: HERE, 1: ENDS}
    assert not roll.ends


def test_an_exchange_is_open_once_a_site_has_come_from_its_loop(board):
    late = at(board, 2)
    come(board, 1, ENDS)
    assert not late.is_open(0)
    come(board, 0)
    assert late.is_open(0)


def test_a_site_that_has_ended_is_not_waited_for(board):
    board.left.add(2)
    come(board, 1)
    looks = []
    at(board, 0, grace_s=9.0, look=lambda: looks.append(None)).attend(0, HERE)
    assert len(looks) == 1


@pytest.mark.parametrize(("least", "own"), [(3, HERE), (2, ENDS)])
def test_if_too_few_are_left_nobody_waits(board, least, own):
    board.left.add(2)
    come(board, 1, own)
    with pytest.raises(ExchangeError, match="site 2 left before this exchange") as caught:
        at(board, 0, least).attend(0, own)
    assert (caught.value.sites, caught.value.kind) == ((2,), Failure.CLOSED)


class ReadByRead(OneBoard):
    """A board on which something happens after its n-th read."""

    def __init__(self, board, reads, then):
        self.slots, self.left = board.slots, board.left
        self._reads, self._then = reads, then

    def _read(self, found):
        self._reads -= 1
        if self._reads == 0:
            self._then()
        return found

    def slot(self, key):
        return self._read(super().slot(key))

    def farewell(self, site, session):
        return self._read(super().farewell(site, session))


@pytest.mark.parametrize(("least", "own"), [(3, HERE), (2, ENDS)])
@pytest.mark.parametrize("reads", range(1, 12))
def test_others_may_decide_and_leave_between_any_two_reads(board, least, own, reads):
    def others():
        come(board, 1, own), come(board, 2, own)
        decided.append(at(board, 1, least).attend(0, own))
        board.left |= {1, 2}

    decided = []
    roll = at(ReadByRead(board, reads, others), 0, least).attend(0, own)
    assert [roll] == decided
    assert roll.of_all


def test_with_nothing_to_share_there_is_nothing_to_exchange():
    nothing = Presence(weight=4, shares=False)
    assert Roll(there={0: nothing, 1: nothing}, sites=2).weight == 0
    assert Roll(there={0: nothing, 1: HERE}, sites=2).weight == 5


ODD = ["", "{", "[]", "{}", '{"3": [1, 1, 0]}', '{"0": [1]}', '{"0": [-1, 1, 0]}', '{"a": 1}']


@pytest.mark.parametrize("text", ODD)
def test_what_cannot_be_read_is_an_error(board, text):
    board.first("here takes part 0", text)
    with pytest.raises(ExchangeError, match="cannot be read"):
        at(board, 0).decided(0)
