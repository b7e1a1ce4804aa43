"""Slots of the hub's board belong to their writer, and are written once."""

from __future__ import annotations

import json

import pytest

from hub_sites import HubSite, refused, sites_of_a_hub
from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import GIVEN_UP, THERE, TROUBLE, word_slot
from outergrad.commit.membership_record import COME, COMING, GOING_ON, MembershipRecord
from outergrad.commit.peer_requests import Question, answer_key, asked_slot
from outergrad.star import slots
from outergrad.star.frames import Hello, Kind, MalformedError
from outergrad.star.hub import RefusedError

WORD = FailureReport(3, made=3).text()
QUESTION = Question(by=0, of=1, made=3, place=0).text()
TEXTS = {
    "a word": (word_slot(0), WORD),
    "how far it is": ("made 0", "3"),
    "what a step brought": ("brought 3 0", "digest"),
    "that it has read": ("read by 0", "all"),
    "that it has read digests": ("read 3 0", "read"),
    "where it pauses": ("made when others came 0", "9"),
    "that it is in trouble": (TROUBLE, "0"),
    "a question": (asked_slot(0), QUESTION),
    "that a step is there": ("way to 3", THERE),
    "who waits": (COMING, "d"),
    "who comes": (COME, "d"),
    "that others go on": (GOING_ON, MembershipRecord.proposed(3, [0, 1])),
    "that none goes on": (GOING_ON, "[]"),
    "a rank that is none": (word_slot(9), GIVEN_UP),
    "that it is there": ("quorum 0 1 there 0 5", "[1, 1, 0]"),
    "that others take part": ("quorum 0 1 takes part 5", '{"0": [1, 1, 0], "2": [1, 1, 0]}'),
}
CONTENTS = {
    "what a step brought": "step 3 0",
    "digests": "made 3 0",
    "a repeated message": answer_key(0),
    "a change": "quorum 0 1 change 0 5",
}


def three():
    sites, told = sites_of_a_hub(3)
    return *sites, told


@pytest.mark.parametrize(("key", "text"), TEXTS.values(), ids=TEXTS)
def test_no_site_writes_a_text_for_another(key, text):
    first, _, bad, told = three()
    with refused(bad):
        bad.first(key, text)
    assert first.slot(key) is None
    (line,) = told.of("refused")
    assert line["site"] == "c"


@pytest.mark.parametrize("as_rank", [0, 2])
@pytest.mark.parametrize("key", CONTENTS.values(), ids=CONTENTS)
def test_no_site_puts_a_content_for_another(key, as_rank):
    first, _, bad, _ = three()
    first.first(asked_slot(0), QUESTION)
    with refused(bad):
        bad.put(key, b"of another", as_rank=as_rank)
    assert first.get(key) is None


def test_a_content_that_points_at_parts_of_another_site():
    first, _, bad, _ = three()
    first.put("step 3 0", b"content")
    with refused(bad):
        bad.ask(Kind.PUT, "step 3 2", b"0 1 2")


def test_its_own_a_site_writes_and_all_read():
    first, second, third, _ = three()
    assert first.first(word_slot(0), WORD) == WORD
    assert first.first(TROUBLE, "0") == "0"
    assert second.first(TROUBLE, "1") == "0"
    assert first.first(asked_slot(0), QUESTION) == QUESTION
    second.put(answer_key(0), b"message")
    first.put("step 3 0", b"content")
    assert first.get(answer_key(0)) == b"message"
    assert third.get("step 3 0") == b"content"
    assert third.slot(word_slot(0)) == WORD


def rewritten(site, key):
    site.put(key, b"first")
    yield lambda: site.put(key, b"second")
    yield lambda: site.ask(Kind.FIRST, key, b"2 1 2")


def test_sites_take_part_as_they_have_said():
    first, other, bad, _ = three()
    first.first("quorum 0 1 there 0 5", "[3, 1, 0]")
    other.first("quorum 0 1 there 1 5", "[4, 1, 0]")
    with refused(bad):
        bad.first("quorum 0 1 takes part 5", '{"0": [9, 1, 0], "1": [4, 1, 0]}')
    said = '{"0": [3, 1, 0], "1": [4, 1, 0]}'
    assert first.first("quorum 0 1 takes part 5", said) == said


@pytest.mark.parametrize("key", ["step 3 2", "made 3 2", "anything"])
@pytest.mark.parametrize("turn", [0, 1])
def test_what_stands_in_a_slot_stays_there(key, turn):
    first, second, bad, _ = three()
    again = rewritten(bad, key)
    change = [next(again) for _ in range(turn + 1)][-1]
    assert first.get(key) == b"first"
    change()
    assert second.get(key) == b"first"


def test_the_parts_of_a_content_stay_too():
    first, second, bad, _ = three()
    bad.put("step 3 2", b"firstfirst")
    number = bad.slot("step 3 2").split()[1]
    assert first.get("step 3 2") == b"firstfirst"
    bad.ask(Kind.PUT, f"step 3 2/2/{number}/0", b"other")
    assert second.get("step 3 2") == b"firstfirst"


def test_a_site_drops_what_it_has_put_and_nothing_else():
    """Then there is room again."""
    first, other, bad, told = three()
    first.put("quorum 0 1 change 0 5", bytes(1 << 20))
    first.put("quorum 0 1 change 0 6", b"more")
    first.drop("quorum 0 1 change 0 5")
    assert other.slot("quorum 0 1 change 0 5") is None
    assert other.slot("quorum 0 1 change 0 6") is not None
    with refused(bad):
        bad.drop("quorum 0 1 change 0 6")
    assert other.slot("quorum 0 1 change 0 6") is not None
    (line,) = told.of("refused")
    assert line["site"] == "c"


def test_a_room_that_is_dropped_is_free(monkeypatch):
    monkeypatch.setattr(slots, "MOST_BYTES", 6 << 20)
    first, other, _, _ = three()
    for number in range(8):
        first.put(f"quorum 0 1 change 0 {number}", bytes(1 << 20))
        assert other.slot(f"quorum 0 1 change 0 {number}") is not None
        first.drop(f"quorum 0 1 change 0 {number}")


def test_that_a_site_was_given_up_is_taken_when_it_has_had_time_to_speak():
    (first, second, bad), told = sites_of_a_hub(3)
    board, now = bad.run._slots, [0.0]
    board._clock = lambda: now[0]
    assert bad.first(word_slot(0), GIVEN_UP) == ""
    bad.first(TROUBLE, "2")
    assert bad.first(word_slot(0), GIVEN_UP) == ""
    assert first.first(word_slot(0), WORD) == WORD
    assert bad.first(word_slot(0), GIVEN_UP) == WORD
    now[0] = 1.5
    assert bad.first(word_slot(1), GIVEN_UP) == GIVEN_UP
    assert second.first(word_slot(1), WORD) == GIVEN_UP
    assert {"run": 1, "site": "b", "by": "c"} in told.of("given up")


def test_a_site_that_is_gone_is_given_up_at_once():
    first, second, third, _ = three()
    second.send(Kind.GONE)
    assert third.first(word_slot(1), GIVEN_UP) == GIVEN_UP
    assert first.slot(word_slot(1)) == GIVEN_UP


def test_a_farewell_becomes_a_word_as_its_site_has_left_it():
    first, second, bad, _ = three()
    farewell = FailureReport(3, made=3, ended="session").text()
    second.text("end/1", farewell)
    assert first.texts[1, "end/1"] == farewell
    assert first.first(word_slot(1), farewell) == farewell
    with refused(bad):
        bad.first(word_slot(0), farewell)


# -- who goes on ----------------------------------------------------------------------------------


def in_trouble(sites, lost=(), made=3):
    for site in sites:
        site.first(word_slot(site.rank), FailureReport(made, made=made, gone=tuple(lost)).text())
        site.first(TROUBLE, str(site.rank))
        site.first(f"made {site.rank}", str(made))


def test_no_site_shuts_out_one_that_is_there():
    first, second, bad, told = three()
    in_trouble([first, second, bad])
    for _ in range(3):
        assert bad.first(GOING_ON, MembershipRecord.proposed(3, [1, 2])) == ""
    why = "that it goes on without 'a', which is there"
    assert told.of("not taken") == [{"run": 1, "site": "c", "why": why}]
    assert first.first(GOING_ON, MembershipRecord.proposed(3, [0, 1, 2]))
    assert told.of("goes on") == [{"run": 1, "by": "a", "sites": ["a", "b", "c"]}]


def test_who_blames_another_site_is_in_the_log():
    first, second, bad, told = three()
    in_trouble([first, second])
    in_trouble([bad], lost=[0])
    bad.first(GOING_ON, MembershipRecord.proposed(3, [1, 2]))
    words = {line["site"]: line["missed"] for line in told.of("gives up")}
    assert words == {"a": [], "b": [], "c": ["a"]}
    assert told.of("goes on")[0]["by"] == "c"


def goes_on(site, sites, after=1):
    return HubSite(site.hub, site.name, Hello(f"{site.name} again", after=after, sites=list(sites)))


def test_no_site_shuts_others_out_of_their_continuation():
    """By its greeting alone: the hub goes by what the sites have agreed on."""
    first, second, bad, told = three()
    for sites in ("c", "bc", "abc"):
        with pytest.raises(RefusedError, match="have not agreed on it"):
            goes_on(bad, sites)
    in_trouble([first, second], lost=[2])
    first.first(GOING_ON, MembershipRecord.proposed(3, [0, 1]))
    for sites in ("c", "bc", "ac", "abc"):
        with pytest.raises(RefusedError, match="have not agreed on it"):
            goes_on(bad, sites)
    runs = {goes_on(site, "ab").run for site in (first, second)}
    assert [run.names for run in runs] == [("a", "b")]
    assert [line["sites"] for line in told.of("epoch")] == [["a", "b"]]


def test_nothing_is_said_before_all_are_there():
    """Or it would reach some, and something else the others."""
    (first, *_), _ = sites_of_a_hub(3)
    hub = first.hub
    one = HubSite(type(hub)("ab"), "a")
    for kind in (Kind.TEXT, Kind.FIRST, Kind.GATHER):
        with pytest.raises(MalformedError, match="not there yet"):
            one.send(kind, b"end/1\ntext", total=10)


@pytest.mark.parametrize("number", [0, 1])
def test_what_others_read_in_a_word_is_what_all_read(number):
    """A site that leaves one farewell after another, and a word besides."""
    first, second, bad, _ = three()
    texts = [FailureReport(k, made=k, ended="session").text() for k in (3, 4)]
    bad.text("end/1", texts[0])
    early = first.texts[2, "end/1"]
    bad.text("end/1", texts[1])
    late = second.texts[2, "end/1"]
    assert (early, late) == tuple(texts)
    readers = [(first, early), (second, late)][:: 1 - 2 * number]
    found = {site.first(word_slot(2), text) for site, text in readers}
    assert found == {readers[0][1]}
    assert bad.first(word_slot(2), json.dumps({})) in found


def test_the_hub_means_the_slots_that_sites_use():
    """The hub has words of its own for these, as it imports nothing of a step."""
    assert (slots._TROUBLE.decode(), slots._GIVEN_UP) == (TROUBLE, GIVEN_UP)
    assert (slots._GOING_ON.decode(), slots._COME.decode()) == (GOING_ON, COME)
    assert (slots.COMING, slots._THERE.decode()) == (COMING, THERE)
