"""What a site says of itself when its transport failed: by the kind of the error alone."""

from __future__ import annotations

import pytest

from outergrad.comm.standing import Standing
from outergrad.core.errors import ExchangeError, Failure
from outergrad.step.lost import find_out, standing_of


@pytest.mark.parametrize("kind", Failure)
@pytest.mark.parametrize("sites", [(), (1, 2)])
def test_nothing_is_read_from_the_words_of_an_error(kind, sites):
    """Whatever they are: another transport has words of its own."""
    for words in [one.value for one in Failure]:
        found = standing_of(ExchangeError(words, sites, kind=kind), 3, 7)
        assert found.timed_out == (kind == Failure.TIMEOUT)
        assert found.gone == (sites if kind == Failure.CLOSED else ())
        assert found.silent == (() if kind == Failure.CLOSED else sites)
        unsaid = sites or kind in (Failure.TIMEOUT, Failure.CLOSED)
        assert found.why == ("" if unsaid else words)


class Wordless:
    """A transport whose sites cannot leave each other a word any more."""

    world_size, patience_s = 3, 1.0

    def __init__(self, rank, host):
        self.rank, self.host = rank, host

    def give_up(self, *about):
        return None


@pytest.mark.parametrize("host", [None, 0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_without_words_who_holds_the_place_for_them_is_suspected(rank, host):
    """If some site does, and is not this one: then who was waited for."""
    found = find_out(Wordless(rank, host), Standing(3, 7, silent=(2,)))
    assert found.lost == ((2,) if host in (None, rank) else (host,))
    assert found.may_differ == tuple(site for site in range(3) if site != rank)
