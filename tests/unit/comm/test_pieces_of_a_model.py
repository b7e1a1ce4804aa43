"""What a link is like, found from the pieces of a model that is sent: on a clock of the test."""

from __future__ import annotations

import random

import pytest
import torch

from outergrad.comm import agree
from outergrad.comm.work import Ready
from outergrad.core.transport import Comm
from outergrad.core.types import Link


class Timed(Comm):
    """A transport whose broadcasts take what a link says, and what a busy machine adds."""

    rank, world_size, patience_s = 0, 1, 30.0

    def __init__(self, link: Link, added_s: list[float]) -> None:
        self.link, self.added_s, self.now = link, iter(added_s), 0.0

    def broadcast(self, t):
        self.now += self.link.delay_s + t.nbytes / self.link.bytes_per_s + next(self.added_s)

    def control(self, words):
        return torch.tensor(words)

    def all_gather(self, t, sizes, lane=0):
        return Ready([t])

    def settle_pace(self, link, timeout_s):
        self.found = link


@pytest.fixture
def found(monkeypatch):
    def of(link: Link, nbytes: int, added_s: list[float] | None = None) -> Link:
        comm = Timed(link, added_s or [0.0] * 1000)
        monkeypatch.setattr(agree.time, "monotonic", lambda: comm.now)
        way = agree.Course(comm)
        way.broadcast(torch.zeros(nbytes, dtype=torch.uint8))
        way.settle()
        return comm.found

    return of


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01, 0.2])
@pytest.mark.parametrize("bytes_per_s", [1e5, 1e6, 1e8, 2e9])
@pytest.mark.parametrize("nbytes", [9_000, 160_000, 12_000_000])
def test_the_delay_is_what_no_byte_takes(found, delay_s: float, bytes_per_s: float, nbytes: int):
    link = found(Link(delay_s, bytes_per_s), nbytes)
    assert link.delay_s == pytest.approx(delay_s, rel=0.01, abs=2e-5)


@pytest.mark.parametrize("seed", range(200))
def test_a_busy_machine_hides_no_delay(found, seed: int):
    """Every third piece waits for the processor; one of the others tells how far the sites are."""
    draw = random.Random(seed)
    added_s = [draw.expovariate(2e3) + draw.choice([0, 0, draw.expovariate(1e2)]) for _ in range(9)]
    added_s[draw.randrange(4)] = added_s[draw.randrange(4, 7)] = 1e-4  # one small, one large
    link = found(Link(0.01, 2e9), 12_000_000, added_s)
    assert 0.009 < link.delay_s < 0.0105


def test_the_bytes_of_a_single_piece_may_have_taken_all_of_it(found):
    assert found(Link(0.01, 1e9), 4096).delay_s == 0.0
