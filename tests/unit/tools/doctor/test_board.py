from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from made_up_sites import boards

from outergrad.comm.board import bounded

HANGS = """
import sys, time
from outergrad import cli
from outergrad.tools.commands import app
from outergrad.comm.board import bounded

def command():
    try:
        bounded(lambda: time.sleep(100), 0.05)
    except TimeoutError:
        sys.exit(3)

app.app = command
cli.main()
"""


def fail():
    raise KeyError("mine")


def test_work_in_time_returns_or_raises():
    assert bounded(lambda: 7, 5) == 7
    assert bounded(lambda: None, 5) is None
    with pytest.raises(KeyError, match="mine"):
        bounded(fail, 5)


def test_work_that_hangs_is_left():
    release = threading.Event()
    began_s = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within"):
        bounded(lambda: release.wait(20), 0.05)
    assert time.monotonic() - began_s < 5
    release.set()


@pytest.mark.slow
def test_a_process_ends_though_work_hangs():
    done = subprocess.run([sys.executable, "-c", HANGS], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (3, b"")


def test_who_is_silent_is_told_after_the_limit_and_what_is_there_is_read():
    heard = []
    first, second = boards(2, tell=heard.append)
    second.post("note/1", "here")
    assert first.wait("note", [0, 1], 0.05) == [0]
    assert heard[0] == "waiting for site 0"
    assert first.read_all("note", [0, 1]) == {1: "here"}
    first.post("note/0", "too")
    assert first.wait("note", [0, 1], 0.05) == []
