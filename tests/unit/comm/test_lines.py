"""What lines over gloo have of their own: threads, receipts, and gloo itself."""

from __future__ import annotations

import threading

import pytest
import torch

from lines import CPU, LONG_S, letter, within
from outergrad.comm.torch import TorchComm
from ranks import run_on_lasting_groups, run_ranks


def opened(group, sites, number, most_bytes=100):
    return TorchComm(group, CPU).exchange_with(sites, number, most_bytes)


def threads_of_lines():
    return [t for t in threading.enumerate() if t.name.startswith("outergrad line")]


def test_no_thread_is_left():
    def body(rank, group):
        opened(group, [r for r in range(4) if r != rank], 4).close()

    run_on_lasting_groups(4, body)
    for thread in threads_of_lines():
        thread.join(LONG_S)
    assert not threads_of_lines()


def test_a_site_that_closes_reads_no_more_than_the_goodbye():
    """Its thread ends also where letters wait that nobody has read."""

    def body(rank, group):
        lines = opened(group, [1 - rank], 13)
        for number in range(50 * rank):
            lines.send(0, letter(number))
        lines.close()
        assert all(line.ended(within(LONG_S)) for line in lines._lines.values())
        return [len(line.letters) for line in lines._lines.values()]

    assert max(map(max, run_on_lasting_groups(2, body))) <= 4


def test_a_site_that_never_says_what_has_arrived_is_not_answered_for_ever():
    """What is on its way is kept until the other end has it: that must not grow."""

    def body(rank, group):
        lines = opened(group, [1 - rank], 14)
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


def test_a_message_that_only_a_hub_s_lines_have_closes_a_line():
    def body(rank, group):
        lines = opened(group, [1 - rank], 15)
        if rank == 0:
            group.send([torch.tensor([15, 3, 0, 0, 0, 0, 0])], 1, lines._lines[1]._tag).wait()
        found = None if rank == 0 else lines.next(0, within(LONG_S))
        why = lines.why_closed(1 - rank)
        lines.close()
        return found, why

    assert run_ranks(2, body)[1] == (None, "its message is of another session")


def test_a_group_without_gloo_has_no_lines(monkeypatch):
    monkeypatch.setattr("outergrad.comm.torch.is_gloo", lambda group: False)

    def body(rank, group):
        comm = TorchComm(group, CPU)
        assert not comm.has_lines
        with pytest.raises(RuntimeError, match="need gloo: init_process_group"):
            comm.exchange_with([1 - rank], 8, 100)

    run_on_lasting_groups(2, body)
