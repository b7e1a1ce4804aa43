"""Lines around a hub: bounded at the hub and at a site, and nobody speaks in another's lane."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from hub_sites import refused, sites_of_a_hub
from lines import LONG_S, SOON_S, letter, on_blind_star, within
from outergrad.comm.torch import TorchComm
from outergrad.core.errors import ExchangeError
from outergrad.messages.letters import ENDED, LEFT_OUT, LetterKind
from outergrad.star.frames import LANES, Frame, Kind, Place
from outergrad.star.groups import Groups, asked_for
from outergrad.star.run import Run
from outergrad.star.window import WINDOW_BYTES
from stars import CPU, Proxy, comms_on_star, group_on, hub, on_star, star

MIB = 1 << 20


# -- at the hub ------------------------------------------------------------------------------------


def in_lanes(*pairs):
    """Four sites of a hub, and the lanes of pairs of them."""
    sites, told = sites_of_a_hub(4)
    lanes = {}
    for pair in pairs:
        for rank in pair:
            sites[rank].send(Kind.GROUP, asked_for(f"line {pair}", pair), number=1)
            lanes[pair] = int([f for f in sites[rank].hear() if f.kind == Kind.ANSWER][-1].payload)
    return sites, lanes, told


def says(site, lane, other, nbytes=MIB, number=1):
    about = {"lane": lane, "recipient": other, "number": number, "total": nbytes}
    site.send(Kind.LETTER, bytes(nbytes), **about)


def waiting(site):
    return sum(len(kept.frame.payload) for kept in site.member.pipe._unsent)


def test_what_a_slow_site_does_not_take_is_a_window_of_each_pair_and_stops_no_other():
    (a, b, c, d), lanes, told = in_lanes((0, 2), (0, 1), (1, 2))
    with refused(a, "more than a window"):
        for number in range(100):
            says(a, lanes[0, 2], 2, number=number + 1)
    assert WINDOW_BYTES <= waiting(c) <= WINDOW_BYTES + MIB
    says(b, lanes[1, 2], 2)
    says(b, lanes[0, 1], 0)
    assert [(f.kind, f.sender) for f in a.hear()] == [(Kind.LETTER, 1)]
    assert [facts["site"] for facts in told.of("refused")] == ["a"]
    assert not d.hear()


def test_what_is_sent_to_a_site_that_is_lost_is_not_kept_and_frees_the_window():
    (a, _, c, _), lanes, _ = in_lanes((0, 2))
    says(a, lanes[0, 2], 2)
    assert waiting(c) >= MIB
    with c.hub._lock:
        c.hub._lose(c.run, c.member, "its line was down")
    for number in range(40):  # five windows
        says(a, lanes[0, 2], 2, number=number + 2)
    assert waiting(c) == 0


def test_nobody_speaks_in_the_lane_of_two_others():
    (_, _, c, d), lanes, told = in_lanes((0, 1))
    with refused(c, f"a frame of lane {LANES}, of a group that it is not in"):
        says(c, lanes[0, 1], 1)
    with refused(d, "under the name of 'a'"):
        d.send(Kind.LETTER, b"1", lane=LANES, recipient=1, sender=0, total=1)
    assert [facts["site"] for facts in told.of("refused")] == ["c", "d"]


# -- at a site -------------------------------------------------------------------------------------


def test_a_site_that_sends_before_there_is_room_is_left_out_and_the_others_are_heard():
    """Site 2 goes by no rule; what it floods site 0 with is not kept."""
    flooded = threading.Event()

    def body(comm):
        rank = comm.rank
        lines = comm.exchange_with([r for r in range(3) if r != rank], 1, 1000)
        if rank == 2:
            end = lines._ends[0]
            assert lines.next(0, within(LONG_S)).number == 1
            with comm._line.changed:
                for number in range(2000):
                    end._unread.clear()
                    end._held.append(letter(number, *[1] * 1000))
                    end._write()
            while comm._line._out._lanes:
                time.sleep(SOON_S)
            comm.board.slot("behind all that was sent")
            flooded.set()
            lines.next(0, within(LONG_S))  # the other has looked
            return None
        other, found = 1 - rank, None
        lines.send(other, letter(5))
        lines.send(2, letter(1))
        if rank == 0:
            assert flooded.wait(LONG_S)
            numbers = [getattr(lines.next(2, within(LONG_S)), "number", None) for _ in range(6)]
            found = numbers, lines.why_closed(2), len(lines._ends[2]._room)
        heard = lines.next(other, within(LONG_S)).number
        lines.close()
        return heard, found

    first, second, _ = comms_on_star(3, body)
    told = "its message has come before there was room for it"
    assert first == (5, ([0, 1, 2, 3, None, None], told, 0))
    assert second == (5, None)


def test_a_pair_of_which_one_does_not_read_stops_no_other():
    """Site 2 reads nothing of site 0, which has more for it than any window holds."""

    def body(comm):
        rank, size = comm.rank, 2 * MIB
        lines = comm.exchange_with([r for r in range(3) if r != rank], 1, size)
        long = letter(0)._replace(content=letter(0, 1).content.repeat(size))
        if rank == 0:
            for number in range(20):
                lines.send(2, long._replace(number=number))
        began, heard = time.monotonic(), 0
        for number in range(5):
            for other in [r for r in range(3) if r != rank and {r, rank} != {0, 2}]:
                lines.send(other, long._replace(number=number))
                heard += lines.next(other, within(LONG_S)) is not None
        took_s = time.monotonic() - began
        unread = len(lines._ends[0].letters) if rank == 2 else None
        late = [lines.next(0, within(LONG_S)).number for _ in range(20)] if rank == 2 else None
        if rank:
            lines.send(0, letter(9))
        else:
            assert [lines.next(other, within(LONG_S)).number for other in (1, 2)] == [9, 9]
        lines.close()
        return heard, took_s < LONG_S, unread, late

    assert comms_on_star(3, body) == [
        (5, True, None, None),
        (10, True, None, None),
        (5, True, 4, list(range(20))),
    ]


def test_a_site_that_never_says_what_it_has_read_is_not_answered_for_ever():
    def body(comm):
        other = 1 - comm.rank
        lines = comm.exchange_with([other], 1, 100)
        end = lines._ends[other]
        for number in range(20):
            if comm.rank == 1:  # it hides what it has read
                end._read = -1000
                end._unread.clear()
            lines.send(other, letter(number, *range(100)))
            if lines.next(other, within(1.0)) is None:
                break
        return number, len(end._held) + len(end._unread), lines.why_closed(other)

    number, held, why = comms_on_star(2, body)[0]
    assert number < 8
    assert held == 0  # the line is closed
    assert why.startswith("it answers and says that")


def test_a_part_that_is_not_the_next_one_closes_its_line():
    def body(comm):
        other = 1 - comm.rank
        lines = comm.exchange_with([other], 1, 100)
        lines.send(other, letter(0, 1))
        found = [lines.next(other, within(LONG_S)).number]
        if comm.rank == 1:
            end = lines._ends[0]
            place = Place(Kind.LETTER, end._lane, 77)
            comm._line.send(place, bytes(end._least_bytes), 0)
            return lines.next(0, within(LONG_S)), lines.why_closed(0)
        found.append(lines.next(1, within(LONG_S)))
        why = lines.why_closed(1)
        lines.send(1, letter(3))  # dropped
        lines.close()
        return found, why

    told = "its message is not the next one"
    assert comms_on_star(2, body) == [([0, None], told), (None, LEFT_OUT)]


@pytest.mark.parametrize("kind", [kind for kind in LetterKind if kind > LetterKind.LAST])
def test_what_is_said_beside_letters_has_no_content(kind):
    def body(comm):
        lines = comm.exchange_with([1 - comm.rank], 1, 100)
        if comm.rank == 1:
            assert lines.next(0, within(LONG_S)).number == 0
            end = lines._ends[0]
            with comm._line.changed:
                end._say(kind, letter(0, 1, 2, 3))
            lines.next(0, within(LONG_S))
            return lines.why_closed(0)
        lines.send(1, letter(0))
        assert lines.next(1, within(LONG_S)) is None
        return lines.why_closed(1)

    assert comms_on_star(2, body) == ["its message is of 3 bytes", LEFT_OUT]


def test_a_site_that_is_gone_is_so_in_the_words_of_the_hub():
    def body(comm):
        others = [r for r in range(3) if r != comm.rank]
        lines = comm.exchange_with(others, 1, 100)
        for other in others:
            lines.send(other, letter(0))
            assert lines.next(other, within(LONG_S)).number == 0
        if comm.rank == 2:
            lines.send(0, letter(1, 2))
            comm.close()
            return None
        found = lines.next(2, within(LONG_S)) if comm.rank == 0 else None
        assert lines.next(2, within(LONG_S)) is None
        lines.send(2, letter(0))
        lines.send(1 - comm.rank, letter(6))
        heard = lines.next(1 - comm.rank, within(LONG_S)).number
        lines.close()
        return found and found.number, heard, lines.why_closed(2)

    gone = "it is gone: it left"
    assert comms_on_star(3, body)[:2] == [(1, 6, gone), (None, 6, gone)]


def forgotten(comm):
    until = within(LONG_S)
    while comm._line._letters and time.monotonic() < until:
        time.sleep(SOON_S)
    return not comm._line._letters


@pytest.mark.parametrize("unread", [0, 15])
def test_lines_that_are_closed_at_both_ends_are_forgotten(unread):
    """Also where neither has read what the other sent, which is more than there is room for."""

    def body(comm):
        lines = comm.exchange_with([1 - comm.rank], 1, 100)
        for number in range(unread):
            lines.send(1 - comm.rank, letter(number, 1))
        held = len(comm._line._letters)
        lines.close()
        return held, forgotten(comm)

    assert comms_on_star(2, body) == [(1, True)] * 2


def test_lines_to_a_site_that_is_gone_are_forgotten():
    def body(comm):
        lines = comm.exchange_with([1 - comm.rank], 1, 100)
        lines.send(1 - comm.rank, letter(0, 1))
        assert lines.next(1 - comm.rank, within(LONG_S)).number == 0
        if comm.rank == 1:
            comm.close()
            return True
        assert lines.next(1, within(LONG_S)) is None
        lines.close()
        return forgotten(comm)

    assert comms_on_star(2, body) == [True, True]


def test_cuts_of_a_line_lose_no_letter():
    with hub(2, grace_s=5.0) as server:
        proxy = Proxy(server.port)
        stars = [star(server, 0), star(server, 1, proxy.port)]

        def body(rank, one):
            comm = one.open(CPU, timeout=timedelta(seconds=20))
            lines = comm.exchange_with([1 - rank], 1, 300_000)
            content = letter(0, *range(100)).content.repeat(3000)
            for number in range(40):
                lines.send(1 - rank, letter(number)._replace(content=content))
                heard = lines.next(1 - rank, within(LONG_S))
                assert heard.number == number
                assert heard.content.equal(content)
                if rank and number % 5 == 0:
                    proxy.cut()
            return True

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(body, range(2), stars)) == [True] * 2
        for one in stars:
            one.close()
        proxy.close()


def test_sessions_of_two_groups_with_the_same_number_have_lines_of_their_own():
    def body(rank, one):
        other = 1 - rank
        groups = [group_on(one, name=name, ranks=range(2)) for name in ("some", "same")]
        comms = [TorchComm(group, CPU) for group in groups]
        both = [comm.exchange_with([other], 1, 100) for comm in comms]
        for number, lines in enumerate(both):
            lines.send(other, letter(number))
        found = [lines.next(other, within(LONG_S)) for lines in both]
        for lines in both:
            lines.close()
        return [one and one.number for one in found]

    assert on_star(2, body) == [[0, 1]] * 2


# -- a hub that must not read ---------------------------------------------------------------------


def test_the_hub_reads_no_letter_and_cannot_change_one(monkeypatch):
    seen, take = [], Run.take

    def passes(run, member, frame):
        if frame.kind == Kind.LETTER:
            seen.append(bytes(frame.payload))
            if member.rank == 1 and len(frame.payload) > 1000:
                changed = bytes([frame.payload[0] ^ 1]) + bytes(frame.payload[1:])
                frame = Frame(*frame[:1], changed, *frame[2:])._replace(checksum=None)
        take(run, member, frame)

    monkeypatch.setattr(Run, "take", passes)

    def body(comm):
        other = 1 - comm.rank
        lines = comm.exchange_with([other], 1, 10_000)
        found, secret = [], letter(0, *b"secret").content
        for number, times in enumerate((1, 500)):
            lines.send(other, letter(number)._replace(content=secret.repeat(times)))
            heard = lines.next(other, within(LONG_S))
            found.append(heard and bytes(heard.content.numpy()))
        why = lines.why_closed(other)
        lines.close()
        return found, why

    first, (whole, _) = on_blind_star(2, body)
    assert first == ([b"secret", None], "what came from site-b was not encrypted by it")
    assert whole == [b"secret", 500 * b"secret"]
    assert len(seen) > 4
    assert not any(b"secret" in one for one in seen)


@pytest.mark.parametrize(
    ("withheld", "told"),
    [
        (0, ""),
        (1, ""),  # a greeting, which is said again
        (2, "its message has come before there was room for it"),
        (5, "its message is not the next one"),
    ],
)
def test_a_hub_that_withholds_the_first_letters_is_noticed(monkeypatch, withheld, told):
    take = Run.take

    def withholds(run, member, frame):
        if frame.kind != Kind.LETTER or member.rank == 0 or frame.number > withheld:
            take(run, member, frame)

    monkeypatch.setattr(Run, "take", withholds)
    opened = threading.Event()

    def body(comm):
        if comm.rank == 0:
            opened.wait(LONG_S)  # so that site 1 does not miss its greeting
        lines = comm.exchange_with([1 - comm.rank], 1, 100)
        opened.set()
        if comm.rank == 0:
            found = lines.next(1, within(LONG_S))
            return found and found.number, lines.why_closed(1)
        for number in range(4):
            lines.send(0, letter(number, ends=True))
        assert lines.next(0, within(LONG_S)) is None
        return lines.why_closed(0)

    found = (None, told) if told else (0, "")
    assert on_blind_star(2, body) == [found, LEFT_OUT if told else ENDED]


def test_a_letter_that_is_too_long_to_be_encrypted_is_refused_where_it_is_sent(monkeypatch):
    """Also one that waits for room; the letters around it arrive."""
    monkeypatch.setattr("outergrad.star.group_seal._MOST_BYTES", 1000)

    def body(comm):
        other = 1 - comm.rank
        lines = comm.exchange_with([other], 1, 10_000)
        lines.send(other, letter(0))
        with pytest.raises(ValueError, match="with blind=1 a message has at most 1000"):
            lines.send(other, letter(1)._replace(content=letter(0, 1).content.repeat(1000)))
        lines.send(other, letter(2))
        return [lines.next(other, within(LONG_S)).number for _ in range(2)]

    assert on_blind_star(2, body) == [[0, 2]] * 2


@pytest.mark.parametrize(
    ("lane", "told"),
    [(1 << 16, "cannot be opened: 65536"), ("9" * 5000, "cannot be opened: 999")],
)
def test_a_hub_that_gives_a_lane_that_cannot_be_is_told_of(monkeypatch, lane, told):
    monkeypatch.setattr(Groups, "answer", lambda *_: str(lane).encode())

    def body(comm):
        with pytest.raises(ExchangeError, match=told):
            comm.exchange_with([1 - comm.rank], 1, 100)

    on_blind_star(2, body)


def test_a_site_that_the_hub_has_put_out_is_told_why_and_not_that_the_hub_is_silent(monkeypatch):
    """This hub names a lane that it then refuses, with the site that speaks in it."""
    monkeypatch.setattr(Groups, "answer", lambda *_: str(LANES).encode())

    def body(comm):
        comm.exchange_with([1 - comm.rank], 1, 100)
        assert comm._line.wait_for(lambda: comm._line.has_failed, LONG_S)
        with pytest.raises(ExchangeError, match=f"a frame of lane {LANES}, which no group has"):
            comm.exchange_with([1 - comm.rank], 2, 100)

    on_blind_star(2, body)


def test_a_hub_that_gives_two_sessions_the_same_lane_is_told_of(monkeypatch):
    """It relays what is sent in this lane, so nothing else tells of it."""
    answer = Groups.answer

    def of_the_first(groups, question, asker):
        return answer(groups, question.replace(b"lines 2", b"lines 1"), asker)

    monkeypatch.setattr(Groups, "answer", of_the_first)

    def body(comm):
        first = comm.exchange_with([1 - comm.rank], 1, 100)
        with pytest.raises(ExchangeError, match=f"the hub has opened lane {LANES} twice"):
            comm.exchange_with([1 - comm.rank], 2, 100)
        first.close()

    on_blind_star(2, body)


@pytest.mark.parametrize("number", [1, 2])
def test_letters_of_one_session_are_not_those_of_another_in_its_place(number):
    """What a site says in the lane of one session is not taken as said in that of another."""

    def body(comm):
        other = 1 - comm.rank
        lines = comm.exchange_with([other], number if comm.rank else 1, 100)
        if comm.rank == 0:
            lines.send(1, letter(4))
        found = lines.next(0, within(1.0)) if comm.rank else None
        return found and found.number

    assert on_blind_star(2, body)[1] == {1: 4, 2: None}[number]
