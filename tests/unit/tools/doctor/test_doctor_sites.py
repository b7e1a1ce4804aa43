from __future__ import annotations

import json

from made_up_sites import VERSIONS, site

from outergrad.tools.doctor.course import check_group
from outergrad.tools.doctor.findings import Level, merged, note, ok, problem
from outergrad.tools.doctor.meeting import (
    Offset,
    check_clocks,
    check_sharing,
    check_versions,
    site_heard,
)


def test_a_description_survives_json():
    me = site(1, findings=[problem("torch", "old", "upgrade"), ok("disk", "free")])
    assert site_heard(json.loads(json.dumps(me.told()))) == me


def test_the_majority_is_right_about_versions():
    other = {**VERSIONS, "torch": "2.12"}
    sites = [site(0, 3, versions=other), site(1, 3), site(2, 3)]
    same, odd = check_versions(sites)
    assert same.level == Level.OK
    assert "torch" not in same.said
    assert odd.said == "site 0 has 2.12 where sites 1 and 2 have 2.11"
    assert odd.level == Level.PROBLEM


def test_equal_findings_are_told_once():
    bad, odd = note("a", "bad"), note("b", "odd")
    assert merged([[bad], [bad, odd]], [0, 2]) == [bad, note("b", "site 2: odd")]


def test_sites_that_share_a_machine():
    assert not [*check_sharing([site(0), site(1)])]
    one = {"host": "h", "address": "10.0.0.1"}
    (finding,) = check_sharing([site(0, **one), site(1, **one)])
    assert "a rehearsal" in finding.said
    (finding,) = check_sharing([site(0, **one), site(1, **one), site(2)])
    assert finding.level == Level.WARNING
    assert "2 sites on h" in finding.said


def test_clocks():
    (close,) = check_clocks({1: Offset(0.003, 0.02)})
    assert close.said == "all within 23.0 ms of site 0's"
    for offset in (Offset(0.5, 0.02), Offset(3.0, 2.0)):  # the latter may be 1 s
        (odd,) = check_clocks({1: offset})
        assert odd.level == Level.NOTE
    (wrong,) = check_clocks({1: Offset(-3600.0, 0.02), 2: Offset(0.0, 0.02)})
    assert wrong.level == Level.WARNING
    assert wrong.said.startswith("site 1 is 3,600.0 s behind site 0")


def test_gloo_names_who_is_not_joined():
    (joined,) = check_group({0: (0.002, None), 1: (0.004, None)}, [0, 1])
    assert joined.said.endswith("4.0 ms")
    (failed,) = check_group({0: (None, "timed out")}, [0, 1])
    assert failed.level == Level.PROBLEM
    assert failed.said == "does not join sites 0 and 1 with the others: timed out"
