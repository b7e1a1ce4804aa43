"""Sites as threads go through all checks: what is found, and who hears it."""

from __future__ import annotations

import time

import pytest
from made_up_sites import VERSIONS, examined, said_at

from outergrad.tools.doctor import meeting as meeting_module
from outergrad.tools.doctor.findings import Level, problem, warning
from outergrad.tools.doctor.meeting import meet


@pytest.mark.parametrize("sites", [2, 3])
def test_all_is_well(sites):
    found = examined(sites, described={rank: {"host": "one"} for rank in range(sites)})
    report, code = found[0]
    assert code == 0
    assert not [f for f in report.findings if f.level > Level.NOTE]
    assert said_at(report, "meeting") == [f"OK: all {sites} sites came"]
    assert len(report.links) == sites * (sites - 1) // 2
    assert all(link.slowest > 1e6 for link in report.links)
    assert said_at(report, "gloo")[0].startswith("OK: joins all sites")
    assert [found[rank][0].findings for rank in range(1, sites)] == [[]] * (sites - 1)


def test_a_missing_site_is_named_at_every_other_within_the_timeout():
    began_s = time.monotonic()
    found = examined(3, present=[0, 2], timeout_s=1)
    assert time.monotonic() - began_s < 6
    for report, code in found.values():
        assert code == 1
        assert said_at(report, "meeting") == ["PROBLEM: site 1 did not come within 1 s"]
    assert [(link.lower, link.higher) for link in found[0][0].links] == [(0, 2)]


def test_without_site_0_the_others_name_it_and_who_else_is_missing():
    found = examined(4, present=[1, 3], timeout_s=1)
    for report, code in found.values():
        assert code == 1
        assert said_at(report, "meeting") == ["PROBLEM: sites 0 and 2 did not come within 1 s"]


def test_a_site_that_stops_after_it_came_is_named(monkeypatch):
    monkeypatch.setattr(meeting_module, "_ANSWER_S", 1.0)
    stop = {1: lambda board, me: meet(board, me, 5) and None}
    found = examined(3, instead=stop)
    report, code = found[0]
    assert code == found[2][1] == 1
    assert said_at(report, "meeting") == ["PROBLEM: site 1 stopped answering during the checks"]
    assert "NOTE: site 1's was not measured" in said_at(report, "clocks")[0]


def test_other_versions_are_named():
    odd = {1: {"versions": {**VERSIONS, "torch": "2.12", "numpy": "2.1"}}}
    report, code = examined(3, described=odd)[0]
    assert code == 1
    assert said_at(report, "torch") == [
        "PROBLEM: site 1 has 2.12 where sites 0 and 2 have 2.11",
    ]
    assert said_at(report, "numpy") == ["NOTE: site 1 has 2.1 where sites 0 and 2 have 2.0"]


def test_a_wrong_clock_is_found():
    report, code = examined(3, clocks={2: lambda: time.time() - 90})[0]
    assert code == 1  # these made-up machines listen on loopback
    assert said_at(report, "clocks")[0].startswith("WARNING: site 2 is 90.0 s behind site 0")
    offset = report.offsets[2]
    assert offset is not None
    assert offset.seconds == pytest.approx(-90, abs=offset.uncertain_s + 1e-3)
    assert abs(report.offsets[1].seconds) < 1


def test_other_numbers_of_sites_are_named():
    found = examined(3, present=[0, 1], timeout_s=1, described={1: {"sites": 2}})
    assert said_at(found[1][0], "meeting") == [
        "PROBLEM: site 1 expects 2 sites, site 0 expects 3",
    ]
    assert "PROBLEM: site 1 expects 2 sites, site 0 3" in said_at(found[0][0], "meeting")


def test_what_the_machines_found_of_themselves_is_told_with_their_sites():
    bad = problem("torch", "is too old", "upgrade")
    odd = warning("disk", "full", "make room")
    report, code = examined(
        3, described={0: {"findings": [bad]}, 1: {"findings": [bad, odd]}, 2: {"findings": [bad]}}
    )[0]
    assert code == 1
    assert said_at(report, "torch") == ["PROBLEM: is too old"]
    assert said_at(report, "disk") == ["WARNING: site 1: full"]


def test_a_site_that_cannot_be_connected_to_is_named():
    report, code = examined(2, described={1: {"port": 1}})[0]
    assert code == 1
    assert said_at(report, "links")[0] == (
        "PROBLEM: site 0 cannot connect to site 1 at 127.0.0.1:1: refused"
    )
    assert report.links[0].slowest  # over the connection from the other side


def test_two_processes_with_one_number():
    from made_up_sites import boards, site

    (first, second) = boards(2, [1, 1])
    first.post("site/1", site(1).told())
    with pytest.raises(RuntimeError, match="two processes say that they are site 1: one on host1"):
        meet(second, site(1, host="elsewhere"), 1)
