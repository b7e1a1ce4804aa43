"""Namespaces are removed, whatever ends the program that made them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import outergrad
from outergrad.launch import namespaces as module
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad.launch.namespaces import mark, namespaces, qdiscs

LATE = ShapedLink(rate_bit_per_s=None, rtt_s=0.01)
real = pytest.mark.skipif(
    what_is_missing(LATE, 3) is not None, reason=str(what_is_missing(LATE, 3))
)
HOLD = """
import signal, sys, time, types
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules["outergrad"] = package = types.ModuleType("outergrad")
package.__path__ = sys.argv[1:]  # without torch, which takes seconds to import

from outergrad.launch.namespaces import namespaces
try:
    with namespaces(3, 1e7, 0.01) as names:
        print(*names, flush=True)
        time.sleep(60)
finally:
    print("in order")
"""


def existing():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return set(re.findall(r"^\S+", listed.stdout, re.MULTILINE))


def namespaces_of(pid):
    return [name for name in existing() if name.startswith(f"outergrad-{pid}-")]


def wait_until(happened):
    patience_s = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < patience_s
        time.sleep(0.02)


def test_the_burst_is_short_and_the_queue_long():
    assert qdiscs(None) == []
    words = "root tbf rate 10000000bit burst 4096b limit 1048576b"
    assert qdiscs(1e7) == [words.split()]
    words = "root tbf rate 1000000000bit burst 31250b limit 6250000b"
    assert qdiscs(1e9) == [words.split()]


def test_netem_delays_half_the_round_trip_at_each_site(monkeypatch):
    ran = []
    monkeypatch.setattr(module, "has_netem", lambda: True)
    monkeypatch.setattr(module, "_run", lambda *command: ran.append(" ".join(command)))
    with module._joined(["a", "b"], "hub", 1e7, 0.04):
        pass
    tbf = "tbf rate 10000000bit burst 4096b limit 1048576b"
    assert ran[0] == "ip link add link0 netns a type veth peer name link0 netns b"
    for site in "ab":
        delay = f"tc -n {site} qdisc add dev link0 root handle 1: netem delay 20000us limit 1000000"
        assert ran.index(delay) + 1 == ran.index(
            f"tc -n {site} qdisc add dev link0 parent 1: {tbf}"
        )
    assert not any("tap" in command for command in ran)


@real
@pytest.mark.slow
def test_an_exception_leaves_nothing_though_a_process_is_inside():
    names, processes = [], []

    def fail_at_work():
        with namespaces(2, None, 0.0) as made:
            names.extend(made)
            processes.append(subprocess.Popen(["ip", "netns", "exec", made[1], "sleep", "60"]))
            assert set(made) <= existing()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_at_work()
    assert not set(names) & existing()
    with processes[0] as process:
        process.kill()


@real
@pytest.mark.slow
def test_two_links_at_once_do_not_meet():
    with namespaces(2, None, 0.0) as outer:
        with namespaces(2, None, 0.0) as inner:
            assert not set(outer) & set(inner)
        assert set(outer) <= existing()


@real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -2)],
)
def test_a_signal_leaves_neither_namespaces_nor_processes(number, code):
    command = [sys.executable, "-c", HOLD, str(Path(outergrad.__file__).parent)]
    said = subprocess.PIPE
    with subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL, text=True) as holder:
        assert holder.stdout is not None
        names = set(holder.stdout.readline().split())
        helpers = psutil.Process(holder.pid).children(recursive=True)
        assert len(names) == 3
        assert names <= existing()
        assert len(helpers) == 2  # the janitor and the relay
        holder.send_signal(number)
        assert holder.wait(10) == code
        assert holder.stdout.read() == ("" if number == signal.SIGKILL else "in order\n")
    wait_until(lambda: not namespaces_of(holder.pid))
    wait_until(lambda: not any(helper.is_running() for helper in helpers))


@real
@pytest.mark.slow
def test_what_a_killed_run_left_is_removed():
    with subprocess.Popen(["true"]) as ended:
        pass
    left = f"outergrad-{ended.pid}-{mark()}-ab-0"
    elsewhere = f"outergrad-{ended.pid}-0123abcd-ab-0"  # where that number may be a process
    for name in (left, elsewhere):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with namespaces(2, None, 0.0):
            assert left not in existing()
            assert elsewhere in existing()
    finally:
        subprocess.run(["ip", "netns", "del", elsewhere], check=True)


@real
@pytest.mark.slow
def test_a_command_that_fails_is_told_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'not\nallowed' >&2; exit 1")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = r"^--link: `tc .*\(not allowed\): use --link loopback$"
    with pytest.raises(RecipeError, match=said), namespaces(2, 1e7, 0.0):
        pass
    assert not namespaces_of(os.getpid())
