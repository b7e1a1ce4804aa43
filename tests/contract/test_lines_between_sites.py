"""Lines of every transport: letters in order, late ones wait, and no third site is waited for."""

from __future__ import annotations

import gc
import threading

import pytest

from lines import LONG_S, SOON_S, WAYS, letter, within


@pytest.fixture(params=WAYS)
def run(request):
    return WAYS[request.param]


def test_letters_arrive_whole_and_in_order(run):
    def body(comm):
        other = 1 - comm.rank
        lines = comm.exchange_with([other], 1, 100)
        before = comm.sent_bytes, comm.received_bytes
        for number in range(20):
            lines.send(other, letter(number, comm.rank, number, share=0.1 * number))
        found = [lines.next(other, within(LONG_S)) for _ in range(20)]
        lines.send(other, letter(7, ends=True))
        last = lines.next(other, within(LONG_S))
        lines.close()
        counted = comm.sent_bytes - before[0], comm.received_bytes - before[1]
        return found, last, counted

    for rank, (found, last, counted) in enumerate(run(2, body)):
        assert [one.number for one in found] == list(range(20))
        assert [one.content.tolist() for one in found] == [[1 - rank, n] for n in range(20)]
        assert [one.share for one in found] == [0.1 * n for n in range(20)]
        assert not any(one.ends for one in found)
        assert (last.number, last.ends, last.content.numel()) == (7, True, 0)
        assert counted == (20 * (56 + 2) + 56,) * 2


def test_long_letters_arrive_as_they_were_sent(run):
    """Of more bytes than a part of a message, at both ends at once."""

    def body(comm):
        other, size = 1 - comm.rank, 3_000_001
        lines = comm.exchange_with([other], 1, size)
        own = letter(1, 1).content.repeat(size).mul_(comm.rank + 1)
        for number in range(4):
            lines.send(other, letter(number)._replace(content=own))
        found = [lines.next(other, within(LONG_S)).content for _ in range(4)]
        lines.close()
        return [(len(one), one.unique().tolist()) for one in found]

    assert run(2, body) == [[(3_000_001, [2])] * 4, [(3_000_001, [1])] * 4]


def test_a_late_letter_is_not_lost_and_others_do_not_wait_for_it(run):
    ready = threading.Event()

    def body(comm):
        rank = comm.rank
        lines = comm.exchange_with([r for r in range(3) if r != rank], 2, 100)
        told = None
        if rank != 2:
            lines.send(1 - rank, letter(0, rank))
            assert lines.next(1 - rank, within(LONG_S)).content.tolist() == [1 - rank]
        if rank == 0:
            missing = lines.next(2, within(SOON_S))
            why = lines.why_closed(2)
            ready.set()
            told = missing, why, lines.next(2, within(LONG_S)).content.tolist()
        elif rank == 2:
            ready.wait(LONG_S)
            lines.send(0, letter(0, 2))
        lines.close()
        return told

    assert run(3, body)[0] == (None, "", [2])


def test_what_is_sent_before_the_other_end_is_open_waits_for_it(run):
    sent = threading.Event()

    def body(comm):
        if comm.rank == 1:
            sent.wait(LONG_S)
        lines = comm.exchange_with([1 - comm.rank], 3, 100)
        if comm.rank == 0:
            for number in range(3):
                lines.send(1, letter(number, 9))
            sent.set()
            return lines.next(1, within(LONG_S)).number
        found = [lines.next(0, within(LONG_S)).number for _ in range(3)]
        lines.send(0, letter(8))
        return found

    assert run(2, body) == [8, [0, 1, 2]]


def test_a_goodbye_closes_a_line_behind_what_was_sent(run):
    def body(comm):
        lines = comm.exchange_with([1 - comm.rank], 3, 100)
        if comm.rank == 0:
            lines.send(1, letter(0, 5))
            lines.close()
            return None
        first = lines.next(0, within(LONG_S))
        none = lines.next(0, within(LONG_S))
        why = lines.why_closed(0)
        lines.send(0, letter(0))  # to a site that is gone: dropped
        lines.close()
        return first.content.tolist(), none, why

    assert run(2, body)[1] == ([5], None, "its session has ended")


def test_lines_that_are_collected_say_goodbye(run):
    def body(comm):
        lines = comm.exchange_with([1 - comm.rank], 5, 100)
        if comm.rank == 0:
            del lines
            gc.collect()
            return None
        return lines.next(0, within(LONG_S)), lines.why_closed(0)

    assert run(2, body)[1] == (None, "its session has ended")


@pytest.mark.parametrize(
    ("most_bytes", "told"), [(2999, "its message is of 3000 bytes"), (3000, "")]
)
def test_a_letter_that_is_longer_than_was_declared_closes_its_line(run, most_bytes, told):
    def body(comm):
        lines = comm.exchange_with([1 - comm.rank], 6, 3000 if comm.rank == 0 else most_bytes)
        found = None
        if comm.rank == 0:
            lines.send(1, letter(0, *[7] * 3000))
        else:
            heard = lines.next(0, within(LONG_S))
            found = heard is not None, lines.why_closed(0) if heard is None else ""
        lines.close()
        return found

    assert run(2, body)[1] == (not told, told)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (letter(0, share=-1.0), "its message has the number 0 and the share -1.0"),
        (letter(0, share=float("nan")), "its message has the number 0 and the share nan"),
        (letter(-1), "its message has the number -1 and"),
        (letter((1 << 63) - 1, ends=True), "its message has the number 9223372036854775807 and"),
    ],
)
def test_a_letter_that_nobody_sends_in_earnest_closes_its_line(run, sent, told):
    """A share below 0 would carry the other site away; int64 ends behind the last number."""

    def body(comm):
        lines = comm.exchange_with([1 - comm.rank], 11, 100)
        if comm.rank == 0:
            lines.send(1, sent)
        found = None if comm.rank == 0 else lines.next(0, within(LONG_S))
        why = lines.why_closed(1 - comm.rank)
        lines.close()
        return found, why

    found, why = run(2, body)[1]
    assert found is None
    assert why.startswith(told)


def test_damaged_letters_close_their_line_at_both_ends(run, monkeypatch):
    calls = [1, 0]
    monkeypatch.setattr("outergrad.messages.letters.checksum", lambda t: int(t[0]) + calls.pop())

    def body(comm):
        lines = comm.exchange_with([1 - comm.rank], 7, 100)
        other = 1 - comm.rank
        if comm.rank == 0:
            lines.send(1, letter(0, 3))
        found = lines.next(other, within(LONG_S))
        why = lines.why_closed(other)
        lines.close()
        return found, why

    left_out = "it has left this site out, and its log says why"
    assert run(2, body) == [(None, left_out), (None, "its message was damaged on its way")]


def test_letters_that_nobody_reads_stay_with_their_sender(run):
    def body(comm):
        lines = comm.exchange_with([1 - comm.rank], 12, 100)
        if comm.rank == 0:
            for number in range(50):
                lines.send(1, letter(number, *[1] * 100))
            lines.close()
            return lines.next(1, within(LONG_S))
        threading.Event().wait(10 * SOON_S)
        (line,) = (getattr(lines, "_lines", None) or lines._ends).values()
        held = len(line.letters)
        numbers = [lines.next(0, within(LONG_S)).number for _ in range(50)]
        assert lines.next(0, within(LONG_S)) is None
        lines.close()
        return held, numbers

    assert run(2, body)[1] == (4, list(range(50)))


def test_they_are_lines_of_their_own_session(run):
    """Letters of one session are none of another on the same transport."""

    def body(comm):
        other = 1 - comm.rank
        both = [comm.exchange_with([other], number, 100) for number in (9, 10)]
        for number, lines in enumerate(reversed(both)):
            lines.send(other, letter(number))
        found = [lines.next(other, within(LONG_S)).number for lines in both]
        for lines in both:
            lines.close()
        return found

    assert run(2, body) == [[1, 0], [1, 0]]
