"""Seconds of a step on a link, by hand."""

from __future__ import annotations

import pytest

from outergrad.comm.cost import Pattern
from outergrad.comm.trace import Awaited, Started, Trace, Tracer
from outergrad.launch.links import ShapedLink
from outergrad.tools.plan.link_time import LEAST_RTT_S, step_seconds, wire_bytes

MB = 1_000_000
FAST = ShapedLink(rate_bit_per_s=None)


def link(transfer_s: float, rtt_s: float = 0.0, pattern: Pattern = Pattern.PAIRS) -> ShapedLink:
    """On which a message of a megabyte takes so long."""
    return ShapedLink(rate_bit_per_s=8 * wire_bytes(MB, pattern, 2) / transfer_s, rtt_s=rtt_s)


def trace(
    *events: tuple[str, float], compute_s: float = 1.0, pattern: Pattern = Pattern.PAIRS
) -> Trace:
    """Messages of a megabyte are started, and awaited in the same order."""
    found, awaited = [], 0
    for what, at_s in events:
        if what == "start":
            found.append(Started(at_s, pattern, MB, MB))
        else:
            found.append(Awaited(at_s, awaited))
            awaited += 1
    return Trace(tuple(found), compute_s)


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
    "a ring": (
        trace(("start", 1.0), ("wait", 1.0), pattern=Pattern.RING),
        link(4, rtt_s=1, pattern=Pattern.RING),
        1 + 2 + 4,
    ),
    "a ring in the round trips of another": (
        trace(("start", 1.0), ("start", 1.0), ("wait", 1.0), ("wait", 1.0), pattern=Pattern.RING),
        link(4, rtt_s=1, pattern=Pattern.RING),
        1 + 1 + 4 + 4,
    ),
}


@pytest.mark.parametrize(("step", "on", "seconds"), STEPS.values(), ids=STEPS)
def test_a_step_takes_what_it_computes_and_waits(step, on, seconds):
    assert step_seconds(step, on, sites=2) == pytest.approx(seconds, abs=3 * LEAST_RTT_S)


@pytest.mark.parametrize("sites", [2, 3, 8])
def test_a_ring_of_small_messages_takes_two_rounds_of_all_sites(sites):
    step = trace(("start", 1.0), ("wait", 1.0), pattern=Pattern.RING)
    on = ShapedLink(rate_bit_per_s=None, rtt_s=1)
    assert step_seconds(step, on, sites) == pytest.approx(1 + 2 * (sites - 1))


@pytest.mark.parametrize("pattern", Pattern)
def test_an_interface_counts_headers_and_acknowledgements(pattern):
    assert 1.065 * MB < wire_bytes(MB, pattern, sites=2) < 1.07 * MB


def test_what_is_done_away_is_not_counted():
    tracer = Tracer()
    tracer.begin()
    with tracer.away():
        began = sum(range(1_000_000))
        first = tracer.started(Pattern.PAIRS, 1, 1)
    second = tracer.started(Pattern.RING, 2, 2)
    tracer.awaited(second)
    found = tracer.end()
    assert (first, second, began > 0) == (0, 1, True)
    assert [m.pattern for m in found.messages] == [Pattern.PAIRS, Pattern.RING]
    assert 0 <= found.events[0].at_s <= found.events[-1].at_s <= found.compute_s < 0.01
