"""Hospitals around a hub, each in a network of its own: their terminals name each event.

Only what terminals print is read. A site's program prints when it calls its hub, because imports
take long on a busy machine; an event is to be named within six seconds.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ipv6 import add_ipv6, address_of, needs_ipv6
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad.launch.namespaces import namespaces
from outergrad.tools.commands.app import app

LINK = ShapedLink(rate_bit_per_s=2e7, rtt_s=0.0)
MISSING = what_is_missing(LINK, 4)
HUB = "10.77.0.1:8443"
NAMED_S, START_S, GRACE_S = 6.0, 120.0, 10.0
SCRIPT = """
import time
import torch
from torch import nn
import outergrad as og
import outergrad.star.dial  # with gRPC, which takes long on a busy machine

model = nn.Linear(20, 8)
transport = og.Star(when_lost="go on", wait_s=60)
print("calls the hub", flush=True)
session = og.distribute(model, og.DAD(), transport=transport, timeout=30)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    try:
        model(torch.randn(4, 20)).square().mean().backward()
    except og.StepDiscardedError as error:
        print(error, flush=True)
        continue
    optimizer.step()
    if session.stats().step % 20 == 0:
        print("step", session.stats().step, flush=True)
    time.sleep(0.05)
"""


class Terminal:
    """A command in a network namespace, with a terminal, whose lines are read.

    Args:
        namespace: Name of the namespace.
        words: Of the command, behind `outergrad`.
        hosts: File with the names that are known there; None for those of this machine.
    """

    def __init__(self, namespace: str, *words: str, hosts: Path | None = None) -> None:
        self._lines: list[tuple[float, str]] = []
        own, end = pty.openpty()
        command = [sys.executable, "-m", "outergrad", *words]
        if hosts is not None:  # the command has a view of its own of the file system
            bound = f"mount --bind {hosts} /etc/hosts && exec {shlex.join(command)}"
            command = ["sh", "-c", bound]
        command = ["ip", "netns", "exec", namespace, *command]
        settings = {"stdin": end, "stdout": end, "stderr": end, "start_new_session": True}
        self._process = subprocess.Popen(command, **settings)
        os.close(end)
        threading.Thread(target=self._read, args=(own,), daemon=True).start()

    def _read(self, own: int) -> None:
        # When nobody writes there any more, reading a terminal ends in an error of the device.
        with suppress(OSError), os.fdopen(own, errors="replace") as lines:
            for line in lines:
                self._lines.append((time.monotonic(), line.rstrip()))

    def says(self, pattern: str, since: float, within_s: float = NAMED_S) -> float:
        """Waits for a line that was printed since; returns when that was."""
        while True:
            late = time.monotonic() > since + within_s + 1.0
            for at, line in list(self._lines):
                if since <= at <= since + within_s and re.search(pattern, line):
                    return at
            assert not late, f"no {pattern!r} within {within_s:g} s:\n{self}"
            time.sleep(0.05)

    def end(self, how: int = signal.SIGKILL) -> float:
        """Ends the command by a signal; returns when."""
        at = time.monotonic()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, how)
        self._process.wait(30)
        return at

    def __str__(self) -> str:
        return "\n".join(line for _, line in self._lines)


@contextmanager
def terminals() -> Iterator[dict[str, Terminal]]:
    """Terminals by name, whose commands are ended in the end."""
    found: dict[str, Terminal] = {}
    try:
        yield found
    finally:
        for one in found.values():
            one.end()


def command(*words: str) -> float:
    """Runs a short command of `outergrad`; returns when it began."""
    at = time.monotonic()
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, done.output
    return at


def kit_for(address: str, path: Path) -> str:
    """Writes hospital-a's kit, with another address of the hub."""
    told = json.loads(Path("hospital-a.kit").read_text())
    path.write_text(json.dumps(told | {"hub": address}))
    path.chmod(0o600)
    return str(path)


def site(namespace: str, kit: str, hosts: Path | None = None) -> tuple[Terminal, float]:
    """Starts a site; returns its terminal, and when it has called its hub."""
    began = time.monotonic()
    terminal = Terminal(namespace, "site", "--kit", kit, "train.py", hosts=hosts)
    return terminal, terminal.says("^calls the hub", began, START_S)


def link(namespace: str, state: str) -> float:
    at = time.monotonic()
    subprocess.run(["ip", "-n", namespace, "link", "set", "link0", state], check=True)
    return at


@pytest.fixture
def network(tmp_path, monkeypatch):
    """Four networks, of a hub and three hospitals, and a folder with kits for two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(SCRIPT)
    command("hub", "init", "hub", "--address", HUB)
    for name in ("hospital-a", "hospital-b"):
        command("hub", "invite", name)
    with namespaces(4, LINK.rate_bit_per_s, 0.0) as names:
        yield names


needs_namespaces = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@needs_namespaces
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.alone
def test_terminals_name_each_event(network):
    at_hub, at_a, at_b, at_c = network
    with terminals() as open_:
        began = time.monotonic()
        hub = open_["hub"] = Terminal(at_hub, "hub", "serve", "--grace", f"{GRACE_S:g}")
        hub.says("listens on port 8443 for hospital-a, hospital-b", began, START_S)

        a, at = site(at_a, "hospital-a.kit")
        open_["a"] = a
        hub.says("hospital-a joins from 10.77.0.2; the run waits for hospital-b", at)
        a.says("hospital-a is waiting for hospital-b, 5 of 60 s", at, 5.0 + NAMED_S)
        b, at = site(at_b, "hospital-b.kit")
        open_["b"] = b
        hub.says("hospital-b joins from 10.77.0.3", at)
        for one in (hub, a, b):
            one.says("begins.*hospital-a and hospital-b", at)

        at = link(at_b, "down")
        hub.says("hospital-b goes away: its line is down", at)
        a.says("hospital-b is away", at)
        b.says(f"hospital-b: the hub at {HUB} is out of reach", at)
        at = link(at_b, "up")
        hub.says("hospital-b is back from 10.77.0.3", at)
        a.says("hospital-b is back", at)
        b.says(f"hospital-b: the hub at {HUB} is reached", at)
        a.says("^step", at, START_S)

        at = command("hub", "invite", "hospital-c")
        hub.says("hospital-c is invited", at)
        c, at = site(at_c, "hospital-c.kit")
        open_["c"] = c
        hub.says("hospital-c joins from 10.77.0.4", at)
        hub.says("hospital-a and hospital-b go on, and hospital-c takes part from now on", at)
        for one in (a, b, c):
            one.says("the run goes on, of hospital-a, hospital-b and hospital-c", at)

        at = c.end(signal.SIGINT)
        hub.says("hospital-c leaves", at)
        hub.says("hospital-a and hospital-b go on, without hospital-c", at)
        for one in (a, b):
            one.says("hospital-c has left", at)
            one.says("hospital-c was lost, and step", at)
        c.says("^outergrad: interrupted", at)
        c, at = site(at_c, "hospital-c.kit")
        open_["c"] = c
        hub.says("hospital-c takes part from now on", at)
        c.says("^step", at, START_S)

        at = c.end()
        hub.says("hospital-c goes away", at)
        a.says("hospital-c is away", at)
        hub.says("hospital-c is lost: its line was down for 10 s", at, GRACE_S + NAMED_S)
        hub.says("hospital-a and hospital-b go on, without hospital-c", at, GRACE_S + NAMED_S)
        for one in (a, b):
            one.says("hospital-c was lost, and step", at, GRACE_S + NAMED_S)
        c, at = site(at_c, "hospital-c.kit")
        open_["c"] = c
        hub.says("hospital-c takes part from now on", at)
        a.says("the run goes on, of hospital-a, hospital-b and hospital-c", at)
        c.says("^step", at, START_S)

        at = command("hub", "revoke", "hospital-b")
        hub.says("hospital-b is revoked", at)
        hub.says("hospital-b is lost: it was revoked", at)
        b.says("'hospital-b' does not take part any more: it was revoked", at)
        for one in (a, c):
            one.says("hospital-b is lost: it was revoked", at)
            one.says("hospital-b was lost, and step", at)
        b.end()
        b, at = site(at_b, "hospital-b.kit")
        open_["b"] = b
        b.says(f"outergrad: the hub at {HUB}: 'hospital-b' was revoked", at)
        hub.says("refused: 'hospital-b' was revoked", at)

        at = hub.end(signal.SIGINT)
        for one in (a, c):
            one.says(f"the hub at {HUB} is out of reach: nobody listens on port 8443", at)
        hub = open_["hub"] = Terminal(at_hub, "hub", "serve", "--grace", f"{GRACE_S:g}")
        at = hub.says("listens on port 8443 for hospital-a, hospital-c", at, START_S)
        for one in (a, c):
            one.says("the hub was started anew", at)


@needs_namespaces
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.alone
def test_a_site_says_why_it_does_not_reach_its_hub(network, tmp_path):
    at_hub, at_a, *_ = network
    command("hub", "init", "other", "--address", HUB)
    command("hub", "invite", "hospital-a", "--folder", "other", "--out", "foreign.kit")
    address = ["ip", "-n", at_hub, "addr", "add", "10.77.0.9/24", "dev", "link0"]
    subprocess.run(address, check=True)
    kits = {
        "foreign.kit": "10.77.0.1 is not the hub of this kit: this is a kit of another hub",
        kit_for(
            "10.77.0.1:8444", tmp_path / "port.kit"
        ): "nobody listens on port 8444 of 10.77.0.1",
        kit_for("10.77.0.9:8443", tmp_path / "name.kit"): "is not for the name 10.77.0.9",
        kit_for("10.77.0.7:8443", tmp_path / "gone.kit"): "10.77.0.7 (does not answer|cannot be)",
        kit_for(
            "hub.invalid:8443", tmp_path / "none.kit"
        ): "the name hub.invalid is not known here",
    }
    with terminals() as open_:
        began = time.monotonic()
        hub = open_["hub"] = Terminal(at_hub, "hub", "serve")
        hub.says("listens on port 8443", began, START_S)
        for kit, told in kits.items():
            open_[kit], at = site(at_a, kit)
            open_[kit].says(told, at)
            open_[kit].end()


@needs_namespaces
@needs_ipv6
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.alone
def test_hospitals_train_where_there_is_ipv6_alone(network):
    at_hub, at_a, at_b, _ = network
    add_ipv6(network, alone=0)
    address = f"[{address_of(0)}]:8443"
    command("hub", "init", "six", "--address", address)
    for name in ("hospital-a", "hospital-b"):
        command("hub", "invite", name, "--folder", "six", "--out", f"{name}.six")
    with terminals() as open_:
        began = time.monotonic()
        hub = open_["hub"] = Terminal(at_hub, "hub", "serve", "--folder", "six")
        hub.says("listens on port 8443 for hospital-a, hospital-b", began, START_S)
        a, at = site(at_a, "hospital-a.six")
        open_["a"] = a
        hub.says(f"hospital-a joins from {address_of(1)}", at)
        b, at = site(at_b, "hospital-b.six")
        open_["b"] = b
        hub.says(f"hospital-b joins from {address_of(2)}", at)
        for one in (a, b):
            one.says("^step", at, START_S)
        at = hub.end(signal.SIGINT)
        told = re.escape(f"the hub at {address} is out of reach: nobody listens on port 8443")
        for one in (a, b):
            one.says(told, at)


@needs_namespaces
@needs_ipv6
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("silent", ["IPv6", "IPv4"])
def test_a_hub_is_reached_if_one_address_of_its_name_is_silent(network, tmp_path, silent):
    at_hub, at_a, *_ = network
    add_ipv6(network)
    of_hub, of_site = ("10.77.0.1", address_of(0)), ("10.77.0.2", address_of(1))
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{number} hub.test\n" for number in of_hub))
    command("hub", "init", "both", "--address", "hub.test:8443")
    command("hub", "invite", "hospital-a", "--folder", "both", "--out", "hospital-a.both")
    # The hub hears the calls to this address, and its answers go nowhere.
    nowhere = ["ip", "-n", at_hub, "route", "add", "blackhole", of_site[silent == "IPv6"]]
    subprocess.run(nowhere, check=True)
    with terminals() as open_:
        began = time.monotonic()
        hub = open_["hub"] = Terminal(at_hub, "hub", "serve", "--folder", "both")
        hub.says("listens on port 8443 for hospital-a", began, START_S)
        open_["a"], at = site(at_a, "hospital-a.both", hosts)
        hub.says(f"hospital-a joins from {of_site[silent == 'IPv4']}", at, 4.0)
