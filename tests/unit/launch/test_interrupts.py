"""A signal ends a command also where it comes in a callback of the garbage collector."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, os, signal, sys, time
from outergrad.launch.interrupts import not_lost
from outergrad.launch.processes import exit_on_signals

number, begun, ended = signal.Signals[sys.argv[1]], [], []

def callback(phase, info):
    if phase == "start" and not begun:
        begun.append(True)
        inside(sys.argv[2] == "nested")
        ended.append(True)

def inside(nested):
    if nested:
        return inside(False)
    os.kill(os.getpid(), number)  # its handler is called before the next line

not_lost()
gc.callbacks.append(callback)
try:
    with exit_on_signals():
        gc.collect()
        time.sleep(30)
    print("lost")
finally:
    print("whole" if ended else "cut short", flush=True)
"""


@pytest.mark.parametrize("where", ["direct", "nested"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", -2), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_within_a_collection_is_not_lost(name, code, where):
    command = [sys.executable, "-c", SCRIPT, name, where]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=25)
    assert ended.returncode == code
    assert "Exception ignored" not in ended.stderr
    assert ended.stdout.split() == ["whole"], "what the collector does is not cut short"


def test_a_handler_of_the_users_own_stays():
    command = [sys.executable, "-c", OWN]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=25)
    assert ended.stdout.split() == ["own"]


OWN = """
import os, signal
from outergrad.launch.interrupts import not_lost

signal.signal(signal.SIGINT, lambda *_: print("own", flush=True))
not_lost()
os.kill(os.getpid(), signal.SIGINT)
"""
