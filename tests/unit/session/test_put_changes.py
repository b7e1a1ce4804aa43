"""Changes on the board: their mean is exact, the same for all, and of what was put there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.sites import sites_of
from outergrad.session import put_changes
from outergrad.session.gathering import Presence, Roll
from outergrad.session.put_changes import PutChanges

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
WEIGHTS = {0: 3, 2: 5}
ROLL = Roll(there={rank: Presence(weight=n) for rank, n in WEIGHTS.items()}, sites=3)


class OneBoard:
    """A board in this process."""

    def __init__(self):
        self.contents = {}

    def put(self, key, content):
        self.contents[key] = content

    def get(self, key):
        return self.contents.get(key)

    def drop(self, key):
        del self.contents[key]


@pytest.fixture
def board():
    return OneBoard()


def change(rank, dtype):
    """Also of a number without dimensions, and not contiguous."""
    torch.manual_seed(rank)
    return {"weight": torch.randn(4, 3).to(dtype).t(), "scale": torch.randn(()).to(dtype)}


def at(board, rank, dtype=torch.float32, look=lambda: None):
    """A site's view of the board."""
    about = {"rank": rank, "sites": sites_of(3, ()), "patience_s": 0}
    comm = SimpleNamespace(**about, tap=None, count=lambda sent=0, received=0: None)
    gathering = SimpleNamespace(board=board, slot=lambda what, number: f"{what} {number}")
    return PutChanges(comm, gathering, change(0, dtype), look)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_that_of_64_bits_rounded_once(board, dtype):
    for rank in WEIGHTS:
        at(board, rank, dtype).put(7, change(rank, dtype))
    wide = torch.promote_types(dtype, torch.float64)
    for rank in range(3):
        mean = at(board, rank, dtype).mean(7, ROLL)
        for name, found in mean.items():
            whole = sum(n * change(r, dtype)[name].to(wide) for r, n in WEIGHTS.items())
            assert found.equal((whole / 8).to(dtype))


def test_who_has_nothing_to_share_counts_and_puts_nothing_there(board):
    at(board, 0).put(7, change(0, torch.float32))
    there = {0: Presence(weight=1), 1: Presence(weight=1, shares=False)}
    mean = at(board, 2).mean(7, Roll(there=there, sites=3))
    assert mean["weight"].equal(change(0, torch.float32)["weight"] / 2)


@pytest.mark.parametrize("damage", [lambda c: c[:-1] + bytes([c[-1] ^ 1]), lambda c: c[:-4]])
def test_a_damaged_change_is_an_error_that_names_its_site(board, damage):
    at(board, 0).put(7, change(0, torch.float32))
    at(board, 2).put(7, change(2, torch.float32))
    board.contents["change 2 7"] = damage(board.contents["change 2 7"])
    with pytest.raises(ExchangeError, match="that site 2 put on the board is damaged") as caught:
        at(board, 0).mean(7, ROLL)
    assert caught.value.sites == (2,)


def test_a_change_that_does_not_come_is_an_error_that_names_its_site(board, monkeypatch):
    monkeypatch.setattr(put_changes.time, "sleep", lambda _: None)
    looks = []
    at(board, 0).put(7, change(0, torch.float32))
    with pytest.raises(ExchangeError, match="site 2 has not put its change") as caught:
        at(board, 0, look=lambda: looks.append(None)).mean(7, ROLL)
    assert (caught.value.sites, caught.value.kind) == ((2,), Failure.TIMEOUT)
    assert looks, "it looks whether the others gave up"


def test_what_was_put_there_stays_as_it_was(board):
    """Others may have read it: a site that was interrupted and comes again puts nothing else."""
    own = at(board, 0)
    own.put(7, change(0, torch.float32))
    before = dict(board.contents)
    own.put(7, change(2, torch.float32))
    assert board.contents == before


def test_changes_of_earlier_exchanges_are_dropped(board):
    own = at(board, 0)
    for number in (3, 4, 5):
        own.put(number, change(0, torch.float32))
    own.drop_before(5)
    assert board.contents.keys() == {"change 0 5"}
