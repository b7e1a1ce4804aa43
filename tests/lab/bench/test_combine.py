"""The slowest site makes the step, and each site's bytes are its own."""

from __future__ import annotations

from math import nan

import pytest
from made_up import block, site

from outergrad.launch.traffic import HEADER_BYTES, InterfaceTraffic
from outergrad_lab.bench.combine import arrivals, timings
from outergrad_lab.bench.measure import Block
from outergrad_lab.bench.site import Found
from outergrad_lab.bench.trainer import Phases
from outergrad_lab.bench.until import Mark


def test_a_step_lasts_until_the_last_site_has_made_it():
    one = site(dad=[block(0.1, 0.5), block(0.2)])
    two = site(dad=[block(0.3, 0.2), block(0.1)])
    (dad,) = timings([one, two])
    assert dad.rounds_s == [pytest.approx([0.3, 0.3]), [0.2]]
    assert dad.median_s == pytest.approx(0.3)


def test_sites_that_are_ahead_in_turn_do_not_count_their_waiting_twice():
    one = site(dad=[block(0.5, 0.3, 0.5, 0.3)])
    two = site(dad=[block(0.3, 0.5, 0.3, 0.5)])
    (dad,) = timings([one, two])
    assert sum(dad.rounds_s[0]) == pytest.approx(1.6)


def test_the_spread_is_that_of_all_steps_together():
    (dad,) = timings([site(dad=[block(1.0, 2.0), block(5.0), block(4.0, 3.0)])])
    assert dad.median_s == 3
    assert dad.quartiles_s == (2, 4)


def test_one_step_is_its_own_median():
    (dad,) = timings([site(dad=[block(0.5)])])
    assert (dad.median_s, dad.quartiles_s, dad.ratio_to_ddp) == (0.5, (0.5, 0.5), None)


@pytest.mark.parametrize("slowness", [1, 7])
def test_a_machine_that_slows_in_one_round_does_not_change_the_ratio(slowness):
    rounds = [1, slowness, 1, slowness, slowness]
    ddp = [block(0.4 * s, 0.4 * s) for s in rounds]
    dad = [block(0.1 * s, 0.1 * s) for s in rounds]
    found = timings([site(ddp=ddp, dad=dad)])
    assert [timing.ratio_to_ddp for timing in found] == pytest.approx([1, 0.25])


def test_a_method_with_fewer_rounds_is_compared_within_them():
    ddp = [block(4.0), block(40.0)]
    dad = [block(1.0), block(10.0), block(10.0), block(10.0)]
    assert timings([site(dad=dad, ddp=ddp)])[0].ratio_to_ddp == pytest.approx(0.25)


def test_methods_keep_their_order():
    blocks = {name: [block(1.0)] for name in ("dense", "alone", "ddp", "dad")}
    assert [timing.method for timing in timings([site(**blocks)])] == list(blocks)


def test_bytes_are_per_step_and_a_mean_over_the_sites():
    def sent(size):
        return [block(1, 1, sent_bytes=size, packets=4), block(1, 1, sent_bytes=size, packets=4)]

    (dad,) = timings([site(dad=sent(1000)), site(dad=sent(3000))])
    assert dad.sent_bytes_by_site == [500, 1500]
    assert dad.sent_bytes == 1000
    assert dad.packets == 2
    assert dad.payload_bytes == 1000 - 2 * HEADER_BYTES


def test_claims_are_per_step_and_a_mean_over_the_sites():
    one = site(dad=[block(1, 1, claimed_bytes=100)], ddp=[block(1, 1)])
    two = site(dad=[block(1, 1, claimed_bytes=300)], ddp=[block(1, 1)])
    dad, ddp = timings([one, two])
    assert dad.claimed_bytes == 100
    assert ddp.claimed_bytes is None


def test_phases_are_medians_of_the_first_site_and_only_what_was_measured():
    def blocks(*steps):
        return [Block([Phases(*step) for step in steps], InterfaceTraffic(), None)]

    one = site(
        dad=blocks((1, 2, 3, 0.5, 0.1), (2, 4, 3, 0.5, 0.3), (9, 9, 9, 0.9, 0.2)),
        ddp=blocks((1, 2, 3), (1, 2, 3)),
    )
    two = site(dad=blocks(*3 * [(9, 9, 9, nan, nan)]), ddp=blocks(*2 * [(9, 9, 9)]))
    dad, ddp = timings([one, two])
    assert dad.phases_s == {
        "forward_s": 2,
        "backward_s": 4,
        "optimizer_s": 3,
        "compress_s": 0.5,
        "wait_s": 0.2,
    }
    assert ddp.phases_s == {"forward_s": 1, "backward_s": 2, "optimizer_s": 3}


def test_an_arrival_takes_the_slowest_sites_time_and_the_sites_mean_bytes():
    one = [Mark(20, 1.0, 100, 0.9), Mark(40, 2.0, 200, 0.4)]
    two = [Mark(20, 3.0, 300, 0.9), Mark(40, 4.0, 400, 0.4)]
    found = [Found("mnist", None, marks={"dad": way}) for way in (one, two)]
    (dad,) = arrivals(found, until_loss=0.5)
    assert dad.way == [Mark(20, 3.0, 200, 0.9), Mark(40, 4.0, 300, 0.4)]
    assert (dad.steps, dad.seconds, dad.sent_bytes, dad.loss) == (40, 4.0, 300, 0.4)


@pytest.mark.parametrize(
    ("loss", "reached"), [(0.4, True), (0.5, True), (0.6, False), (nan, False)]
)
def test_only_a_loss_as_low_as_wanted_is_an_arrival(loss, reached):
    found = [Found("mnist", None, marks={"dad": [Mark(20, 1.0, 100, loss)]})]
    assert arrivals(found, until_loss=0.5)[0].reached is reached
