"""What a benchmark says of the time that is left until a loss."""

from __future__ import annotations

from math import exp, inf, nan

import pytest

from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.time_left import TimeLeft, steps_left
from outergrad_lab.bench.until import Mark


def falling(*steps: int, rate: float = 0.01) -> list[Mark]:
    """Marks of a loss that falls by the same share in every step of half a second."""
    return [Mark(n, n / 2, 0, 3 * exp(-rate * n)) for n in steps]


@pytest.mark.parametrize("steps", [(20, 40), (20, 40, 60, 80, 100)])
def test_a_loss_that_falls_by_the_same_share_arrives_when_it_is_said_to(steps):
    assert steps_left(falling(*steps), 3 * exp(-2)) == pytest.approx(200 - steps[-1])


def test_nothing_is_left_where_it_is_low_enough():
    assert steps_left(falling(20, 40), 2.5) == 0


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.0], [2.0, 3.0], [inf, 2.0], [2.0, nan]])
def test_what_does_not_fall_never_arrives(losses):
    assert steps_left([Mark(20 * n, n, 0, loss) for n, loss in enumerate(losses, 1)], 1.0) == inf


def test_methods_that_have_not_begun_are_taken_to_be_as_the_others():
    plan = Plan(workload="mlp", methods=("dad", "ddp"), until_loss=3 * exp(-2), seconds=1e6)
    left = TimeLeft(plan)
    for mark in falling(20, 40):
        told = left.told("dad", mark)
    assert left.seconds() == pytest.approx(2 * 160 / 2)
    assert told.startswith("dad at loss 2.011 of 0.406006, about 2m")
    left.told("ddp", Mark(20, 1.0, 0, 0.1))
    assert left.seconds() == pytest.approx(160 / 2)


def test_no_more_is_left_than_until_it_is_given_up():
    left = TimeLeft(Plan(workload="mlp", methods=("dad",), until_loss=0.1, max_steps=100))
    left.told("dad", Mark(20, 10.0, 0, 2.0))
    assert left.seconds() == pytest.approx(80 / 2)
