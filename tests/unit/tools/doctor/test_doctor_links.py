"""Pairs of sites: how they are found, measured and judged."""

from __future__ import annotations

import socket
from itertools import combinations

import pytest
from made_up_sites import boards, in_threads, site

from outergrad.tools.doctor import links
from outergrad.tools.doctor.findings import Level
from outergrad.tools.doctor.links import (
    Measured,
    check_links,
    connect,
    ddp_step_s,
    listen,
    measure,
    measured,
    rounds,
)
from outergrad.tools.doctor.meeting import Roll, UnmetError

EVEN = {"rtt_s": 0.01, "alone": 1e7, "alone_back": 1e7, "both": 9e6, "both_back": 9e6}


def link(alone=1e7, alone_back=1e7, both=9e6, both_back=9e6, rtt_s=0.01, lower=0, higher=1):
    return Measured(lower, higher, rtt_s, alone, alone_back, both, both_back)


@pytest.mark.parametrize("sites", range(2, 10))
@pytest.mark.parametrize("together", [False, True])
def test_every_pair_has_its_turn_once_and_no_site_twice_in_a_round(sites, together):
    ranks = [3 * site for site in range(sites)]
    found = rounds(ranks, together=together)
    assert sorted(pair for pairs in found for pair in pairs) == sorted(combinations(ranks, 2))
    for pairs in found:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))
    if together:
        assert len(found) == sites - 1 + sites % 2


def test_a_line_is_measured_alike_from_both_ends():
    ends = socket.socketpair()
    with ends[0], ends[1]:
        found = in_threads((0, 1), lambda rank: measure(ends[rank], lower=rank == 0))
    assert found[0] == found[1]
    link = Measured(0, 1, **found[0])
    assert 0 < link.rtt_s < 1
    assert link.slowest > 1e6


def test_a_peer_that_closes_is_an_error():
    ends = socket.socketpair()
    ends[1].close()
    with ends[0], pytest.raises(OSError, match=r"closed|pipe|reset"):
        measure(ends[0], lower=True)


def test_an_address_of_another_machine_is_a_finding():
    with pytest.raises(UnmetError, match=r"cannot listen at 192\.0\.2\.1: ") as caught:
        listen("192.0.2.1")
    assert caught.value.finding.what == "interface"


def test_strangers_are_not_taken_for_a_site():
    listeners = [listen("127.0.0.1") for _ in range(2)]
    sites = [
        site(rank, address="127.0.0.1", port=listener.getsockname()[1])
        for rank, listener in enumerate(listeners)
    ]
    with socket.create_connection(listeners[0].getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
        found = in_threads(
            (0, 1), lambda rank: connect(listeners[rank], sites[rank], sites[1 - rank], "secret")
        )
    for line, why_not in found.values():
        assert why_not is None
        line.close()
    for listener in listeners:
        listener.close()


def test_both_sites_tell_of_a_pair():
    first, second, _ = boards(3)
    why = "site 1 cannot connect to site 0 at 10.0.0.1:40000: refused"
    first.post("pair/0-1/0", {"failures": [], "figures": EVEN})
    second.post("pair/0-1/1", {"failures": [why], "figures": EVEN})
    even, *others = measured(first, Roll([site(0), site(1), site(2)]))
    assert even == Measured(0, 1, **EVEN, failures=[why])
    assert others == [Measured(0, 2, failures=[]), Measured(1, 2, failures=[])]


def test_a_site_that_stops_while_it_is_measured_is_named(monkeypatch):
    ends = socket.socketpair()
    ends[1].close()
    monkeypatch.setattr(links, "connect", lambda *_: (ends[0], None))
    sites = [site(0), site(1)]
    assert links._measure(None, sites[1], sites[0], "secret")["failures"] == [
        "site 0 stopped answering site 1 while they measured"
    ]


def sentences(found, sites=2, rehearsal=False):
    return [(f.level, f.said) for f in check_links(found, sites, rehearsal=rehearsal)]


def test_an_even_link_needs_two_lines():
    first, second = check_links([link()], 2, rehearsal=False)
    assert (first.level, first.said) == (Level.OK, "9.0 Mbit/s between sites 0 and 1")
    assert second.said == "a step of DDP with 10 million parameters spends 36 s there"
    assert second.remedy == "`outergrad plan --link 9.0mbit --latency 10ms` shows what pays"


def test_the_slowest_pair_is_named():
    found = [link(), link(both=1e6, lower=0, higher=2), link(lower=1, higher=2)]
    said = [said for _, said in sentences(found, 3)]
    assert "1.0 Mbit/s between sites 0 and 2, the slowest" in said


def test_what_is_peculiar_is_told():
    said = sentences([link(alone_back=1e6, both_back=1e6)])
    assert said[0] == (
        Level.NOTE,
        "site 1 sends 10.0 times slower than it receives, to and from site 0",
    )
    assert "share one channel" in sentences([link(both=4e6, both_back=5e6)])[0][1]
    assert "400 ms there and back" in sentences([link(rtt_s=0.4)])[0][1]


def test_fast_links_are_not_blamed_for_busy_processors():
    assert len(sentences([link(6e9, 3e9, 1e9, 1e9)])) == 2


def test_what_failed_is_a_problem_and_what_was_not_measured_a_note():
    assert sentences([Measured(0, 1, failures=("refused",)), Measured(0, 2)], 3) == [
        (Level.PROBLEM, "refused"),
        (Level.NOTE, "not measured: sites 0 and 2"),
    ]


def test_a_rehearsal_has_no_link():
    assert sentences([link()], rehearsal=True)[0][1].startswith("between processes of one machine")


def test_ddp_sends_all_but_one_part_twice():
    assert ddp_step_s(10**6, 2, 32e6, 0.0) == pytest.approx(1.0)
    assert ddp_step_s(10**6, 4, 32e6, 0.0) == pytest.approx(1.5)
    assert ddp_step_s(10**6, 2, 32e6, 0.1) == pytest.approx(1.1)
