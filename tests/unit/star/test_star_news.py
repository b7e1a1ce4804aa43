"""Lines for people, at a site and at the hub: one for each event, with the names of sites."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from hub_sites import HubSite, Told, refused, sites_of_a_hub
from outergrad.star.frames import ALL, AWAY, Frame, Hello, Kind, Welcome, packed
from outergrad.star.hub import Hub
from outergrad.star.line import Line, Stream
from outergrad.star.news import Snapshot, news
from outergrad.star.sentences import LEFT, going_on_with, listed, sentence

NAMES = ("hospital-a", "hospital-b", "hospital-c")
START = Snapshot(0.0, down_since=0.0)
THERE = Snapshot(0.0, NAMES, 0, waits=(0.0, 60.0), away=frozenset({1, 2}))
TRAINS = Snapshot(0.0, NAMES, 0, is_ready=True)


def told(before: Snapshot, **changes: object) -> list[str]:
    """Texts of the news, each without a number in place of a name."""
    found = [*news("hospital-a", "hub:1", 30.0, before, replace(before, **changes))]
    assert all(level in (logging.INFO, logging.WARNING) for level, _ in found)
    return [text for _, text in found]


def test_nothing_new_is_no_news():
    for snapshot in (START, THERE, TRAINS):
        assert told(snapshot, at=0.25) == []


def counted(before: Snapshot, until_s: int) -> list[int]:
    """Seconds at which a line is told, looked at four times a second."""
    found, last = [], before
    for quarter in range(1, 4 * until_s + 1):
        now = replace(before, at=quarter / 4)
        found += [quarter // 4 for _ in news("hospital-a", "hub:1", 30.0, last, now)]
        last = now
    return found


def test_a_site_that_waits_says_so_after_5_s_and_counts():
    assert told(replace(THERE, at=4.9), at=5.1) == [
        "hospital-a is waiting for hospital-b and hospital-c, 5 of 60 s"
    ]
    assert told(replace(THERE, at=19.9, away=frozenset({1})), at=20.1) == [
        "hospital-a is waiting for hospital-b, 20 of 60 s"
    ]
    assert counted(THERE, 200) == [5, 10, 20, 30, 40, 50, 60, 120, 180]


def test_a_hub_of_before_that_does_not_say_who_is_there_leaves_all_others():
    before = replace(THERE, at=4.9, away=frozenset())
    assert told(before, at=5.1) == [
        "hospital-a is waiting for hospital-b and hospital-c, 5 of 60 s"
    ]


def test_a_line_that_is_down_is_told_once_it_lasts_and_counted_with_its_reason():
    assert counted(replace(TRAINS, down_since=0.0), 30) == [1, 5, 10, 20, 30]
    down = replace(TRAINS, down_since=0.0, at=1.2)
    why = "nobody listens on port 1 of hub"
    (line,) = told(down, at=1.4, obstacle=why)
    assert line == (
        f"hospital-a: the hub at hub:1 is out of reach: {why}; dialled again, 1 of 30 s"
    )
    assert told(replace(down, at=4.0), at=4.1, down_since=None) == [
        "hospital-a: the hub at hub:1 is reached, after 4 s"
    ]
    assert told(replace(down, at=0.5), at=0.6, down_since=None) == []


@pytest.mark.parametrize(
    ("before", "changes", "line"),
    [
        (THERE, {"away": frozenset({2})}, "hospital-b is there"),
        (
            replace(THERE, away=frozenset({2})),
            {"is_ready": True, "away": frozenset(), "waits": None},
            "hospital-a: the run begins, of hospital-a, hospital-b and hospital-c",
        ),
        (
            replace(THERE, epoch=1),
            {"is_ready": True, "away": frozenset()},
            "hospital-a: the run goes on, of hospital-a, hospital-b and hospital-c",
        ),
        (TRAINS, {"away": frozenset({1})}, "hospital-b is away: the hub waits for its line"),
        (replace(TRAINS, away=frozenset({1})), {"away": frozenset()}, "hospital-b is back"),
        (TRAINS, {"gone": {1: LEFT}}, "hospital-b has left"),
        (TRAINS, {"gone": {1: "it was revoked"}}, "hospital-b is lost: it was revoked"),
        (
            replace(TRAINS, away=frozenset({1})),
            {"away": frozenset(), "gone": {1: "its line was down for 3 s"}},
            "hospital-b is lost: its line was down for 3 s",
        ),
        (TRAINS, {"gone": {1: going_on_with(NAMES[:2])}}, None),
        (
            replace(THERE, names=NAMES[:1], away=frozenset()),
            {"is_ready": True},
            "hospital-a trains alone: no other site takes part",
        ),
    ],
)
def test_each_event_at_a_site_is_one_line(before, changes, line):
    assert told(before, at=0.25, **changes) == ([] if line is None else [line])


def test_a_hub_tells_who_is_missing_and_who_is_away():
    told = Told()
    hub = Hub("abc", told)
    first = HubSite(hub, "a")
    hub.watch()
    assert away(first) == [1, 2]
    second = HubSite(hub, "b")
    hub.watch()
    assert away(first) == away(second) == [2]
    third = HubSite(hub, "c")
    hub.watch()
    assert away(first) == away(second) == []
    hub.leave(third.run, third.member, third.stream)
    hub.watch()
    assert away(first) == away(second) == [2]
    assert [facts["missing"] for facts in told.of("joined")] == [["b", "c"], ["c"], []]


def away(site: HubSite) -> list[int] | None:
    """What the hub has told a site since, of who is away."""
    texts = [bytes(frame.payload) for frame in site.hear() if frame.kind == Kind.TEXT]
    return json.loads(texts[-1].partition(b"\n")[2]) if texts else None


def test_a_site_that_does_not_listen_holds_one_such_text_at_most():
    hub = Hub("abc")
    first = HubSite(hub, "a")
    for _ in range(50):
        second = HubSite(hub, "b", Hello(f"again {_}"))
        hub.watch()
        hub.leave(second.run, second.member, second.stream)
        hub.watch()
    texts = [one for one in first.member.pipe.batch(1 << 30) if one.kind == Kind.TEXT]
    assert len(texts) == 1


def test_no_site_can_tell_in_the_hubs_name_who_is_away():
    (liar, _), _ = sites_of_a_hub(2)
    with refused(liar, "under the name of"):
        liar.send(Kind.TEXT, f"{AWAY}\n[1]".encode(), sender=ALL)


@pytest.mark.parametrize("text", ["[7]", "[-1]", '{"a": 1}', "[true]", "nothing", "[" * 5000])
def test_what_no_hub_says_of_who_is_away_is_not_heard(text):
    line, stream = Line(), Stream()
    welcome = Welcome(1, 0, NAMES, 0, 1.0).frame()
    said = Frame(Kind.TEXT, f"{AWAY}\n{text}".encode(), run=1, sequence=1)
    line.take(stream, packed([welcome, said]))
    assert line.snapshot().away == frozenset()


@pytest.mark.parametrize(
    ("what", "facts", "line"),
    [
        ("joined", {"site": "a", "peer": "ipv4:10.0.0.2:5", "missing": ["b", "c"]},
         "a joins from 10.0.0.2; the run waits for b and c"),
        ("joined", {"site": "a", "peer": "ipv6:%5B::1%5D:5", "missing": []}, "a joins from ::1"),
        ("began", {"run": 1, "sites": ["a", "b"]}, "run 1 begins: a and b"),
        ("epoch", {"run": 2, "sites": ["a"], "without": ["b"], "back": []},
         "run 2 begins: a goes on, without b"),
        ("epoch", {"run": 2, "sites": ["a", "b", "c"], "without": [], "back": ["c"]},
         "run 2 begins: a and b go on, and c takes part from now on"),
        ("away", {"site": "b", "grace_s": 60.0},
         "b goes away: its line is down; after 60 s it counts as lost"),
        ("back", {"site": "b", "peer": "ipv4:10.0.0.3:1"}, "b is back from 10.0.0.3"),
        ("left", {"site": "b", "why": LEFT}, "b leaves"),
        ("left", {"site": "b", "why": going_on_with(["a", "b"])}, ""),
        ("lost", {"site": "b", "why": "it was revoked"}, "b is lost: it was revoked"),
        ("refused", {"site": "b", "why": "'b' sent nonsense"}, "b is refused: 'b' sent nonsense"),
        ("refused", {"host": "1.2.3.4", "why": "'b' was revoked", "times": 7, "within_s": 60.0},
         "a call from 1.2.3.4 is refused: 'b' was revoked (and 7 more times within 60 s)"),
        ("gives up", {"site": "a", "missed": ["b"], "why": ""},
         "a gives up: it waited for b in vain"),
        ("invited", {"site": "c"}, "c is invited: it may call, and join the next run"),
        ("step", {"run": 1}, ""),
    ],
)  # fmt: skip
def test_each_event_at_the_hub_is_one_sentence(what, facts, line):
    assert sentence(what, facts) == line


def test_names_are_listed_as_in_a_sentence():
    assert [listed([]), listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == [
        "", "a", "a and b", "a, b and c",
    ]  # fmt: skip
