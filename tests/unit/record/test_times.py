"""The seconds of a recorded step: its parts are parts of the whole."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.record.recorders import Client
from outergrad.record.stats import Stats
from ranks import run_on_lasting_groups


class Thinned(list):
    every = 3

    def record(self, event):
        self.append(event)


def test_parts_are_means_over_the_same_steps_as_the_whole():
    """One site keeps the other waiting in the steps that are not recorded, or in these alone."""

    def body(rank, group, slow_steps):
        net, heard = nn.Linear(3, 2), Thinned()
        session = og.distribute(net, og.Dense(), group=group, recorder=heard)
        for step in range(7):
            if rank == 1 and step in slow_steps:
                time.sleep(0.2)
            net(torch.ones(1, 3)).sum().backward()
        session.detach()
        return [event for event in heard if isinstance(event, og.events.Step)]

    for slow in ((3, 6), (1, 2, 4, 5)):
        waiting, _ = run_on_lasting_groups(
            2, lambda rank, group, slow=slow: body(rank, group, slow)
        )
        assert [step.step for step in waiting] == [0, 3, 6]
        for step in waiting[1:]:
            assert 0 < step.compress_s + step.replay_s + step.wait_s <= step.seconds
            assert step.wait_s == pytest.approx(0.2 * len(slow) / 6, abs=0.05)


def test_of_the_first_step_the_parts_are_its_own():
    client = Client(Thinned())
    client.spend(Stats(compress_s=1.0, wait_s=2.0))
    assert client.pace(0) == (None, 1.0, 0.0, 2.0)
    for _ in range(2):
        client.spend(Stats(wait_s=0.5))
    pace = client.pace(4)  # of four steps two were discarded, which tell of no time
    assert pace[1:] == (0.0, 0.0, 0.25)
    assert pace.seconds > 0
