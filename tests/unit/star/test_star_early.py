"""What comes before a site has asked for it is bounded, for each sender."""

from __future__ import annotations

import numpy as np
import pytest

from outergrad.core.errors import ExchangeError
from outergrad.star import arrivals
from outergrad.star.frames import MOST_BYTES, Frame, Kind, Stream, Welcome
from outergrad.star.line import Line


class Heard:
    """A line that hears what a hub passes on."""

    def __init__(self):
        self.line, self._stream, self._count = Line(), Stream(), 0
        welcome = Welcome(1, 0, ["a", "b", "c"], 0, 1.0)
        self.line.take(self._stream, welcome.frame().packed())

    def hear(self, sender, number, nbytes, offset=0, total=None):
        self._count += 1
        numbers = {"run": 1, "number": number, "sequence": self._count, "offset": offset}
        total = nbytes if total is None else total
        frame = Frame(Kind.GATHER, bytes(nbytes), sender=sender, total=total, **numbers)
        self.line.take(self._stream, frame.packed())

    def gather(self, sizes):
        place = self.line.place(Kind.GATHER, 0)
        return self.line.wait(place, self.line.expect(place, sizes), 0.2)

    @property
    def kept(self):
        early = [one.early_bytes() for one in self.line._arrivals.values()]
        return sum(nbytes for one in early for nbytes in one.values())


@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setattr(arrivals, "EARLY_BYTES", 1 << 20)
    return Heard()


def test_a_site_that_sends_what_nobody_asked_for_fills_no_memory_and_is_named(heard):
    for number in range(2, 2000):
        heard.hear(2, number, 1 << 16)
    assert heard.kept <= 1 << 20
    heard.hear(1, 1, 8)
    heard.hear(2, 1, 8)
    with pytest.raises(
        ExchangeError, match="c sent far more than this site has asked for"
    ) as caught:
        heard.gather({1: 8, 2: 8})
    assert caught.value.sites == (2,)


def test_who_is_ahead_by_what_is_asked_for_is_not_refused(heard):
    """Two messages ahead, which are more than may come before anything is asked for."""
    nbytes = 3 * MOST_BYTES // 4
    for sender in (1, 2):
        heard.hear(sender, 1, nbytes)
    heard.gather({1: nbytes, 2: nbytes})
    for number in range(2, 40):
        for sender in (1, 2):
            for ahead in (number, number + 1) if number == 2 else (number + 1,):
                heard.hear(sender, ahead, nbytes)
        found = heard.gather({1: nbytes, 2: nbytes})
        assert all(np.array_equal(room, np.zeros(nbytes)) for room in found.values())
    assert not heard.line._early.refused
