"""Seconds of a step on a link, by hand."""

from __future__ import annotations

import pytest

from outergrad.comm.cost import Collective
from outergrad.comm.trace import Awaited, Started, Trace, Tracer
from outergrad.core.cost import Traffic
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink
from outergrad.tools.plan.network import (
    LEAST_RTT_S,
    as_settled,
    network_of,
    sent_wire_bytes,
    step_seconds,
)

MB = 1_000_000
FAST = ShapedLink(rate_bit_per_s=None)
PAIRS, RING = Collective.ALL_GATHER, Collective.ALL_REDUCE


def message(collective: Collective, at_s: float = 0.0, sites: int = 2) -> Started:
    """In which every site sends a megabyte and receives one."""
    return Started(at_s, collective, Traffic(MB, MB), Traffic(sites * MB, sites * MB))


def link(transfer_s: float, rtt_s: float = 0.0, collective: Collective = PAIRS) -> ShapedLink:
    """On which a message of a megabyte takes so long."""
    nbytes = sent_wire_bytes(message(collective), network_of("torch", 2))
    return ShapedLink(rate_bit_per_s=8 * nbytes / transfer_s, rtt_s=rtt_s)


def trace(
    *events: tuple[str, float], compute_s: float = 1.0, collective: Collective = PAIRS
) -> Trace:
    """Messages of a megabyte are started, and awaited in the same order."""
    found, awaited = [], 0
    for what, at_s in events:
        if what == "start":
            found.append(message(collective, at_s))
        else:
            found.append(Awaited(at_s, awaited))
            awaited += 1
    return Trace(tuple(found), compute_s, compute_s)


STEPS = {
    "nothing travels": (trace(), link(5), 1.0),
    "no limit": (trace(("start", 1.0), ("wait", 1.0)), FAST, 1.0),
    "behind all computing": (trace(("start", 1.0), ("wait", 1.0)), link(2), 3.0),
    "beside some computing": (trace(("start", 0.4), ("wait", 0.9)), link(2), 2.5),
    "beside more computing": (trace(("start", 0.1), ("wait", 0.9)), link(0.5), 1.0),
    "one behind the other": (
        trace(("start", 0.5), ("start", 0.75), ("wait", 1.0), ("wait", 1.0)),
        link(2),
        4.5,
    ),
    "two rounds": (
        trace(("start", 0.5), ("wait", 0.5), ("start", 0.75), ("wait", 1.0)),
        link(2),
        0.5 + 2 + 0.25 + 2,
    ),
    "a round trip": (trace(("start", 1.0), ("wait", 1.0)), link(2, rtt_s=1), 4.0),
    "one round trip for several": (
        trace(("start", 1.0), ("start", 1.0), ("wait", 1.0), ("wait", 1.0)),
        link(2, rtt_s=1),
        6.0,
    ),
    "a sum that two sites add up": (
        trace(("start", 1.0), ("wait", 1.0), collective=RING),
        link(4, rtt_s=1, collective=RING),
        1 + 1 + 4,
    ),
    "a sum in the round trip of another": (
        trace(("start", 1.0), ("start", 1.0), ("wait", 1.0), ("wait", 1.0), collective=RING),
        link(4, rtt_s=1, collective=RING),
        1 + 1 + 4 + 4,
    ),
}


@pytest.mark.parametrize(("step", "on", "seconds"), STEPS.values(), ids=STEPS)
def test_a_step_takes_what_it_computes_and_waits(step, on, seconds):
    assert step_seconds(step, on, network_of("torch", 2)) == pytest.approx(
        seconds, abs=3 * LEAST_RTT_S
    )


def test_long_sums_of_two_sites_go_round_a_ring_where_the_link_is_near():
    step = trace(("start", 1.0), ("wait", 1.0), collective=RING)
    near, far = (ShapedLink(rate_bit_per_s=None, rtt_s=rtt_s) for rtt_s in (3e-3, 5e-3))
    network = network_of("torch", 2)
    assert step_seconds(step, near, network) == pytest.approx(1 + 2 * 3e-3)
    assert step_seconds(step, far, network) == pytest.approx(1 + 5e-3)


@pytest.mark.parametrize("sites", [3, 8])
def test_a_sum_of_more_sites_takes_two_rounds_or_where_the_link_is_near_a_ring(sites):
    """A receive that was not posted ahead costs the first round another half."""
    step = trace(("start", 1.0), ("wait", 1.0), collective=RING)
    near, far = (ShapedLink(rate_bit_per_s=None, rtt_s=rtt_s) for rtt_s in (3e-3, 1.0))
    network = network_of("torch", sites)
    assert step_seconds(step, near, network) == pytest.approx(1 + 2 * (sites - 1) * 3e-3)
    assert step_seconds(step, far, network) == pytest.approx(1 + 1.5)
    ahead = short(RING, is_expected=True)
    assert step_seconds(ahead, far, network) == pytest.approx(1 + 1.0)


@pytest.mark.parametrize("collective", Collective)
def test_an_interface_counts_headers_and_acknowledgements(collective):
    nbytes = sent_wire_bytes(message(collective), network_of("torch", 2))
    assert 1.065 * MB < nbytes < 1.07 * MB


def short(collective: Collective, *, is_expected: bool) -> Trace:
    """One message of a hundred bytes."""
    sent, total = Traffic(100, 100), Traffic(200, 200)
    return Trace((Started(1.0, collective, sent, total, is_expected), Awaited(1.0, 0)), 1.0, 1.0)


@pytest.mark.parametrize("collective", [PAIRS, RING])
@pytest.mark.parametrize(("is_expected", "round_trips"), [(False, 1.0), (True, 0.5)])
def test_what_was_expected_takes_one_way(collective, is_expected, round_trips):
    """Of two sites, who also add up short sums straight."""
    on = ShapedLink(rate_bit_per_s=None, rtt_s=2)
    found = step_seconds(short(collective, is_expected=is_expected), on, network_of("torch", 2))
    assert found == pytest.approx(1 + 2 * round_trips)


HEADERS = 66 / 1448
"""Of a byte, with a packet per 1448 bytes; half of it to acknowledge one."""
STAR = {
    "one line carries what three others sent": ("star", None, (1, 3), (3 + 1 / 2) * HEADERS + 3),
    "sums come back once": ("star", None, (1, 1), (1 + 1 / 2) * HEADERS + 1),
    "the hub is fast enough": ("star", 40e6, (1, 3), (3 + 1 / 2) * HEADERS + 3),
    "the hub is half as fast as all lines": (
        "star",
        16e6,
        (1, 3),
        2 * ((3 + 1 / 2) * HEADERS + 3),
    ),
}


@pytest.mark.parametrize(("name", "hub", "sent", "seconds"), STAR.values(), ids=STAR)
def test_a_star_by_hand(name, hub, sent, seconds):
    """Four sites with a line of a megabyte/s, half a second away from the hub there and back."""
    traffic = Traffic(sent[0] * MB, sent[1] * MB)
    of_all = Traffic(4 * sent[0] * MB, 4 * sent[1] * MB)
    events = (Started(1.0, Collective.ALL_GATHER, traffic, of_all), Awaited(1.0, 0))
    on = ShapedLink(rate_bit_per_s=8e6, rtt_s=0.5)
    network = network_of(name, 4, hub)
    assert step_seconds(Trace(events, 1.0, 1.0), on, network) == pytest.approx(1 + 0.5 + seconds)


def test_what_an_interface_of_a_star_sends():
    """Its own once, and acknowledgements of what three others sent."""
    star = network_of("star", 4)
    gathered = Started(
        0.0, PAIRS, Traffic(*star.cost.all_gather(MB, 3 * MB)), Traffic(4 * MB, 12 * MB)
    )
    assert sent_wire_bytes(gathered, star) == pytest.approx(MB * (1 + HEADERS * (1 + 3 / 2)))


@pytest.mark.parametrize("collective", Collective)
def test_a_message_through_a_hub_waits_once(collective):
    events = (Started(1.0, collective, Traffic(8, 8), Traffic(64, 64)), Awaited(1.0, 0))
    on = ShapedLink(rate_bit_per_s=None, rtt_s=1)
    assert step_seconds(Trace(events, 1.0, 1.0), on, network_of("star", 8)) == pytest.approx(2)


def test_methods_hear_of_the_rate_that_all_have_at_once():
    line = ShapedLink(rate_bit_per_s=8e6, rtt_s=0.1)
    free = as_settled(line, network_of("star", 4))
    shared = as_settled(line, network_of("star", 4, 16e6))
    assert free == as_settled(line)
    assert shared.bytes_per_s == pytest.approx(free.bytes_per_s / 2)
    assert as_settled(line, network_of("star", 4, 1e9)) == free


class NoCosts:
    sites = 3


NETWORKS = {
    "hub": ("torch", 1e6, "torch.distributed has no hub"),
    "name": ("hub", None, "--transport must be torch, star or module:factory, not 'hub'"),
    "module": ("nowhere:f", None, "--transport nowhere:f: cannot import"),
    "raises": (lambda sites: 1 // 0, None, "raised ZeroDivisionError"),
    "lacking": (lambda sites: NoCosts(), None, "NoCosts without copies, all_reduce"),
    "other sites": (lambda sites: network_of("star", 2).cost, None, "of 2 sites, not 3"),
}


@pytest.mark.parametrize(("name", "hub", "said"), NETWORKS.values(), ids=NETWORKS)
def test_transports_that_cannot_be_planned(name, hub, said):
    with pytest.raises(RecipeError, match=said):
        network_of(name, 3, hub)


def test_what_is_done_away_is_not_counted():
    tracer = Tracer()
    tracer.begin()
    with tracer.away():
        began = sum(range(1_000_000))
        first = tracer.started(PAIRS, Traffic(1, 1), Traffic(2, 2))
    second = tracer.started(RING, Traffic(2, 2), Traffic(4, 4))
    tracer.awaited(second)
    found = tracer.end()
    assert (first, second, began > 0) == (0, 1, True)
    assert [m.collective for m in found.messages] == [PAIRS, RING]
    assert 0 <= found.events[0].at_s <= found.events[-1].at_s <= found.compute_s < 0.01
