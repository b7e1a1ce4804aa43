"""Lines of a hub come out in order, and never hold it up."""

from __future__ import annotations

import threading
import time

from outergrad.launch import speaker
from outergrad.launch.speaker import Speaker


def test_lines_are_printed_in_order_with_the_time(capsys):
    one = Speaker()
    for number in range(20):
        one.say(f"line {number}")
    one.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [f"line {n}" for n in range(20)]
    assert all(line.startswith("outergrad: ") for line in lines)
    assert all(time.strptime(line.split()[1], "%H:%M:%S") for line in lines)


def test_a_terminal_that_stands_still_holds_nobody_up(monkeypatch):
    printed, goes_on = [], threading.Event()

    def stopped(line: str, **_: object) -> None:
        goes_on.wait(20)
        printed.append(line)

    monkeypatch.setattr(speaker, "say", stopped)
    monkeypatch.setattr(speaker, "_MOST_WAITING", 10)
    one = Speaker()
    began = time.monotonic()
    for number in range(100):
        one.say(f"line {number}")
    assert time.monotonic() - began < 5.0
    goes_on.set()
    one.close()
    assert len(printed) in (11, 12)  # one may have been taken before the queue was full
    missing = [line for line in printed if "more than could be printed" in line]
    assert [int(line.split()[0]) for line in missing] == [100 - (len(printed) - 1)]
