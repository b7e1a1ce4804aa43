"""Lines between pairs of sites: in order, late letters wait, and no third site is waited for."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from outergrad.comm.lines import GlooLines
from outergrad.comm.torch import TorchComm
from outergrad.core.transport import Letter
from ranks import run_on_lasting_groups, run_ranks

SOON_S, LONG_S = 0.05, 10.0
CPU = torch.device("cpu")


def letter(number, *values, share=0.25, ends=False):
    return Letter(number, share, torch.tensor(values, dtype=torch.uint8), ends)


def opened(group, sites, number, most_bytes=100):
    comm = TorchComm(group, CPU)
    return comm, comm.exchange_with(sites, number, most_bytes)


def within(seconds):
    return time.monotonic() + seconds


def threads_of_lines():
    return [t for t in threading.enumerate() if t.name.startswith("outergrad line")]


def test_letters_arrive_whole_and_in_order():
    def body(rank, group):
        comm, lines = opened(group, [1 - rank], 1)
        for number in range(20):
            lines.send(1 - rank, letter(number, rank, number, share=0.1 * number))
        found = [lines.next(1 - rank, within(LONG_S)) for _ in range(20)]
        lines.send(1 - rank, letter(7, ends=True))
        last = lines.next(1 - rank, within(LONG_S))
        lines.close()
        return found, last, (comm.sent_bytes, comm.received_bytes)

    for rank, (found, last, counted) in enumerate(run_on_lasting_groups(2, body)):
        assert [one.number for one in found] == list(range(20))
        assert [one.content.tolist() for one in found] == [[1 - rank, n] for n in range(20)]
        assert [one.share for one in found] == [0.1 * n for n in range(20)]
        assert not any(one.ends for one in found)
        assert (last.number, last.ends, last.content.numel()) == (7, True, 0)
        assert counted == (20 * (56 + 2) + 56,) * 2


def test_a_late_letter_is_not_lost_and_others_do_not_wait_for_it():
    ready = threading.Event()

    def body(rank, group):
        others = [r for r in range(3) if r != rank]
        _, lines = opened(group, others, 2)
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

    assert run_on_lasting_groups(3, body)[0] == (None, "", [2])


def test_a_goodbye_closes_a_line_behind_what_was_sent():
    def body(rank, group):
        _, lines = opened(group, [1 - rank], 3)
        if rank == 0:
            lines.send(1, letter(0, 5))
            lines.close()
            return None
        first = lines.next(0, within(LONG_S))
        none = lines.next(0, within(LONG_S))
        why = lines.why_closed(0)
        lines.send(0, letter(0))  # to a site that is gone: dropped
        lines.close()
        return first.content.tolist(), none, why

    assert run_on_lasting_groups(2, body)[1] == ([5], None, "its session has ended")


def test_no_thread_is_left():
    def body(rank, group):
        _, lines = opened(group, [r for r in range(4) if r != rank], 4)
        lines.close()

    run_on_lasting_groups(4, body)
    for thread in threads_of_lines():
        thread.join(LONG_S)
    assert not threads_of_lines()


def test_lines_that_are_collected_say_goodbye():
    def body(rank, group):
        _, lines = opened(group, [1 - rank], 5)
        if rank == 0:
            del lines
            return None
        return lines.next(0, within(LONG_S)), lines.why_closed(0)

    assert run_on_lasting_groups(2, body)[1] == (None, "its session has ended")


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (letter(0, *range(101)), (False, "its message is of 101 bytes")),
        (letter(0, *range(100)), (True, "")),
    ],
)
def test_a_letter_that_is_too_long_closes_its_line(sent, told):
    def body(rank, group):
        _, lines = opened(group, [1 - rank], 6)
        found = None
        if rank == 0:
            lines.send(1, sent)
        else:
            heard = lines.next(0, within(LONG_S))
            found = heard is not None, lines.why_closed(0) if heard is None else ""
        lines.close()
        return found

    assert run_ranks(2, body)[1] == told


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (letter(0, share=-1.0), "its message has the number 0 and the share -1.0"),
        (letter(0, share=float("nan")), "its message has the number 0 and the share nan"),
        (letter(-1), "its message has the number -1 and"),
        (letter((1 << 63) - 1, ends=True), "its message has the number 9223372036854775807 and"),
    ],
)
def test_a_letter_that_nobody_sends_in_earnest_closes_its_line(sent, told):
    """A share below 0 would carry the other site away; int64 ends behind the last number."""

    def body(rank, group):
        _, lines = opened(group, [1 - rank], 11)
        if rank == 0:
            lines.send(1, sent)
        found = None if rank == 0 else lines.next(0, within(LONG_S))
        why = lines.why_closed(1 - rank)
        lines.close()
        return found, why

    found, why = run_ranks(2, body)[1]
    assert found is None
    assert why.startswith(told)


def test_letters_that_nobody_reads_stay_with_their_sender():
    def body(rank, group):
        _, lines = opened(group, [1 - rank], 12)
        if rank == 0:
            for number in range(50):
                lines.send(1, letter(number))
            lines.close()
            return None
        line = lines._lines[0]
        with line.came:
            assert line.came.wait_for(lambda: len(line.letters) == 4, LONG_S)
        time.sleep(SOON_S)
        held = len(line.letters)
        numbers = [lines.next(0, within(LONG_S)).number for _ in range(50)]
        assert lines.next(0, within(LONG_S)) is None
        lines.close()
        return held, numbers

    assert run_on_lasting_groups(2, body)[1] == (4, list(range(50)))


def test_a_site_that_closes_reads_no_more_than_the_goodbye():
    """Its thread ends also where letters wait that nobody has read."""

    def body(rank, group):
        _, lines = opened(group, [1 - rank], 13)
        for number in range(50 * rank):
            lines.send(0, letter(number))
        lines.close()
        assert all(line.ended(within(LONG_S)) for line in lines._lines.values())
        return [len(line.letters) for line in lines._lines.values()]

    assert max(map(max, run_on_lasting_groups(2, body))) <= 4


def test_a_site_that_never_says_what_has_arrived_is_not_answered_for_ever():
    """What is on its way is kept until the other end has it: that must not grow."""

    def body(rank, group):
        _, lines = opened(group, [1 - rank], 14)
        line = lines._lines[1 - rank]
        held, line._heard = 0, -1000 * rank
        for number in range(20):
            lines.send(1 - rank, letter(number, *range(100)))
            held = max(held, len(line._held))
            if lines.next(1 - rank, within(LONG_S)) is None:
                break
        why = lines.why_closed(1 - rank)
        lines.close()
        return number, held, why

    number, held, why = run_ranks(2, body)[0]
    assert number < 8
    assert held < 16
    assert why.startswith("it answers and says that")


def test_damaged_letters_close_their_line(monkeypatch):
    monkeypatch.setattr("outergrad.comm.lines.checksum", lambda t: int(t[0]) + threads.pop())
    threads = [1, 0]

    def body(rank, group):
        _, lines = opened(group, [1 - rank], 7)
        if rank == 0:
            lines.send(1, letter(0, 3))
        else:
            lines.next(0, within(LONG_S))
        found = lines.why_closed(1 - rank)
        lines.close()
        return found

    assert run_ranks(2, body)[1] == "its message was damaged on its way"


def test_a_group_without_gloo_has_no_lines(monkeypatch):
    monkeypatch.setattr("outergrad.comm.torch.is_gloo", lambda group: False)

    def body(rank, group):
        comm = TorchComm(group, CPU)
        assert not comm.has_lines
        with pytest.raises(RuntimeError, match="need gloo: init_process_group"):
            comm.exchange_with([1 - rank], 8, 100)

    run_on_lasting_groups(2, body)


def test_they_are_lines_of_their_own_session():
    """Letters of one session are none of another on the same group."""

    def body(rank, group):
        comm = TorchComm(group, CPU)
        both = [GlooLines(comm, [1 - rank], number, 100) for number in (9, 10)]
        for number, lines in enumerate(reversed(both)):
            lines.send(1 - rank, letter(number))
        found = [lines.next(1 - rank, within(LONG_S)).number for lines in both]
        for lines in both:
            lines.close()
        return found

    assert run_on_lasting_groups(2, body) == [[1, 0], [1, 0]]
