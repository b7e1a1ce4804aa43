"""The groups of a run at the hub: who is in one, and what others cannot do to it."""

from __future__ import annotations

import pytest

from outergrad.star.frames import ALL, LANES, Frame, Hello, Kind, MalformedError
from outergrad.star.groups import Groups, asked_for
from outergrad.star.hub import Hub
from outergrad.star.sums import coded

FLOAT32 = coded("float32")


class Sites:
    """Three sites at a hub, two of which have a group."""

    def __init__(self):
        self.hub = Hub(["a", "b", "c"])
        self.lines = {name: self.hub.enter(name, Hello(name)) for name in "abc"}
        self.sent = dict.fromkeys("abc", 0)
        for name in "ab":
            self.says(name, Kind.GROUP, asked_for("pair", [0, 1]), number=1)

    def says(self, name, kind, payload, **more):
        self.sent[name] += 1
        about = {"run": 1, "sequence": self.sent[name], "sender": "abc".index(name)}
        frame = Frame(kind, payload, total=len(payload), **{"number": 1, **about, **more})
        self.hub.take(*self.lines[name], frame.packed())

    def hears(self, name):
        frames = self.lines[name][1].pipe.batch(1 << 20)
        return [frame for frame in frames if frame.kind not in (Kind.READY, Kind.TEXT)]


@pytest.fixture
def sites():
    made = Sites()
    for name in "abc":
        made.lanes = {frame.payload for frame in made.hears(name)} or made.lanes
    assert made.lanes == {str(LANES).encode()}
    return made


def test_what_a_group_sends_its_members_hear_alone(sites):
    sites.says("a", Kind.GATHER, b"1234", lane=LANES)
    assert [frame.payload for frame in sites.hears("b")] == [b"1234"]
    assert sites.hears("c") == []


def test_a_sum_of_a_group_waits_for_its_members_alone(sites):
    sites.says("a", Kind.SUM, bytes(4), lane=LANES, dtype=FLOAT32)
    assert sites.hears("b") == []
    sites.says("b", Kind.SUM, bytes(4), lane=LANES, dtype=FLOAT32, recipient=1)
    kinds = {name: [(f.kind, f.payload) for f in sites.hears(name)] for name in "abc"}
    assert kinds["a"][0][0] == Kind.FAULT  # one wants it for all, the other for itself


def test_a_sum_for_one_site_goes_to_it_alone(sites):
    for name in "ab":
        sites.says(name, Kind.SUM, bytes(4), lane=LANES, dtype=FLOAT32, recipient=1)
    assert [(f.kind, f.sender) for f in sites.hears("b")] == [(Kind.SUM, ALL)]
    assert sites.hears("a") == []


@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.SUM, Kind.EACH])
def test_nobody_else_says_anything_in_a_group(sites, kind):
    with pytest.raises(MalformedError, match="of a group that it is not in"):
        sites.says("c", kind, bytes(4), lane=LANES, dtype=FLOAT32, recipient=0)


def test_nothing_is_sent_to_a_site_that_is_not_in_the_group(sites):
    with pytest.raises(MalformedError, match="a frame for 'c'"):
        sites.says("a", Kind.EACH, bytes(4), lane=LANES, recipient=2)
    with pytest.raises(MalformedError, match="a sum for 'c'"):
        sites.says("b", Kind.SUM, bytes(4), lane=LANES, dtype=FLOAT32, recipient=2)


def test_a_sum_is_void_once_a_member_is_gone_that_adds_nothing(sites):
    """Also one that begins later; one to which it has added is made."""
    for name in "ab":
        sites.says(name, Kind.SUM, bytes(4), lane=LANES, number=1, dtype=FLOAT32)
    sites.says("a", Kind.SUM, bytes(4), lane=LANES, number=2, dtype=FLOAT32)
    sites.says("b", Kind.GONE, b"")
    sites.says("a", Kind.SUM, bytes(4), lane=LANES, number=3, dtype=FLOAT32)
    told = [(f.kind, f.number, f.sender) for f in sites.hears("a")]
    void = [one for one in told if one[0] == Kind.VOID]
    assert void == [(Kind.VOID, 2, 1), (Kind.VOID, 3, 1)]
    assert (Kind.SUM, 1, ALL) in told
    assert all(f.kind != Kind.VOID for f in sites.hears("c"))


def test_who_is_late_for_a_sum_is_told(sites):
    sites.says("a", Kind.SUM, bytes(4), lane=LANES, number=5, dtype=FLOAT32)
    sites.says("a", Kind.LATE, f"{LANES} 5".encode())
    sites.says("a", Kind.LATE, f"{LANES} 6".encode())
    assert [frame.payload for frame in sites.hears("a")] == [b"1", b""]
    for wrong in (b"", b"8 x", b"99 1"):
        with pytest.raises(MalformedError):
            sites.says("a", Kind.LATE, wrong)


WRONG = {
    "members that are none": asked_for("g", [0, 3]),
    "a member twice": asked_for("g", [0, 0]),
    "members in another order": asked_for("g", [1, 0]),
    "without the site": asked_for("g", [1, 2]),
    "letters": b"g\n0 x",
    "no members": b"g\n",
    "a name without end": asked_for("g" * 600, [0, 1]),
}


@pytest.mark.parametrize("question", WRONG.values(), ids=WRONG)
def test_a_group_that_cannot_be_is_refused(question):
    with pytest.raises(MalformedError):
        Groups(3).answer(question, 0)


def test_a_run_has_so_many_groups_and_no_more():
    groups = Groups(2)
    answers = {groups.answer(asked_for(f"g{k}", [0, 1]), 0) for k in range(1 << 12)}
    assert len(answers) == 1 << 12
    assert groups.answer(asked_for("one more", [0, 1]), 0) == b"a run has at most 4096 groups"
    assert groups.answer(asked_for("g7", [0, 1]), 1).isdigit()
