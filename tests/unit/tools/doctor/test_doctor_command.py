"""The doctor as a user calls it, in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from typer.testing import CliRunner

from ipv6 import add_ipv6, address_of, needs_ipv6
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad.launch.namespaces import INTERFACE, namespaces
from outergrad.launch.traffic import loopback_name
from outergrad.tools.commands.app import app

DOCTOR = [sys.executable, "-m", "outergrad", "doctor"]
SHAPED = ShapedLink(rate_bit_per_s=2e7)
shaped = pytest.mark.skipif(
    what_is_missing(SHAPED, 2) is not None, reason=str(what_is_missing(SHAPED, 2))
)


def start(*args: str, before=(), **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A test run in the background ignores interrupts, and so would what it starts.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen([*before, *args], env=environment, preexec_fn=heed, **pipes)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        try:
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, stdout, stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_this_machine(alone):
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "This machine" in result.stdout
    assert "VERDICT" in result.stdout


def test_a_problem_is_exit_code_1(alone, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such0")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "GLOO_SOCKET_IFNAME names no-such0" in result.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--rank", "0"], "--rank, --master and --sites go together"),
        (["--rank", "2", "--sites", "2", "--master", "a"], "rank 2 is not one of 2 sites"),
        (["--rank", "0", "--sites", "2", "--master", "a:b"], "--master='a:b' is no address"),
    ],
)
def test_a_mistake_is_exit_code_2(alone, args, said):
    result = CliRunner().invoke(app, ["doctor", *args])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_rehearsal_in_two_processes():
    code, stdout, stderr = ended(start(*DOCTOR, "--sites", "2"))
    assert code == 0, stdout + stderr
    assert "all 2 sites came" in stdout
    assert stdout.count("VERDICT") == 1
    assert not stderr


@pytest.mark.slow
def test_under_torchrun_one_site_talks():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "outergrad", "doctor"]
    code, stdout, stderr = ended(start(*command))
    assert code == 0, stdout + stderr
    assert "all 2 sites came" in stdout
    assert stdout.count("VERDICT") == 1


@pytest.mark.slow
def test_a_missing_site_is_named_by_those_that_came():
    meeting = ["--sites", "3", "--master", f"127.0.0.1:{free_port()}", "--timeout", "5"]
    local = {"GLOO_SOCKET_IFNAME": loopback_name() or "lo"}
    first, last = [start(*DOCTOR, *meeting, "--rank", rank, **local) for rank in ("0", "2")]
    for code, stdout, stderr in (ended(first), ended(last)):
        assert code == 1
        assert "site 1 did not come within 5 s" in stdout
        assert "VERDICT: 1 problem" in stdout
        assert not stderr


@pytest.mark.slow
def test_each_terminal_ends_with_the_verdict():
    meeting = ["--sites", "2", "--master", f"127.0.0.1:{free_port()}"]
    local = {"GLOO_SOCKET_IFNAME": loopback_name() or "lo"}
    first, second = [start(*DOCTOR, *meeting, "--rank", rank, **local) for rank in ("0", "1")]
    (code, stdout, _), (other_code, other_stdout, other_stderr) = ended(first), ended(second)
    assert code == other_code == 0
    assert not other_stderr
    verdict = stdout.splitlines()[-1].removeprefix("VERDICT: ").partition(";")[0].rstrip(".")
    last = f"VERDICT of all sites: {verdict}; site 0 shows the whole report."
    assert other_stdout.splitlines()[-1] == last
    assert "This machine" in other_stdout


def on_two_machines(names: list[str], master: str) -> list[tuple[int, str, str]]:
    """Runs the doctor in two namespaces; returns what `ended` does of each."""
    meeting = [*DOCTOR, "--sites", "2", "--master", master, "--timeout", "20"]
    sites = [
        start(
            *(*meeting, "--rank", str(rank)),
            before=("ip", "netns", "exec", name),
            GLOO_SOCKET_IFNAME=INTERFACE,
        )
        for rank, name in enumerate(names)
    ]
    return [ended(site) for site in sites]


@shaped
@pytest.mark.slow
def test_the_rate_of_a_shaped_link():
    with namespaces(2, SHAPED.rate_bit_per_s, 0.0) as names:
        (code, stdout, stderr), (*others, other_stderr) = on_two_machines(names, "10.77.0.1")
    assert (others[0], other_stderr) == (0, "")
    assert "VERDICT of all sites: " in others[1]
    assert code == 0, stdout + stderr
    rates = [float(figure) for figure in re.findall(r"([\d.]+) Mbit/s", stdout)]
    assert len(rates) == 5  # each way alone, both at once, the slowest
    assert rates == pytest.approx([20] * 5, rel=0.25)
    assert "outergrad plan --link 1" in stdout


@shaped
@needs_ipv6
@pytest.mark.slow
def test_machines_with_ipv6_alone():
    with namespaces(2, SHAPED.rate_bit_per_s, 0.0) as names:
        add_ipv6(names, alone=0)
        (code, stdout, stderr), (other_code, other_stdout, _) = on_two_machines(
            names, f"[{address_of(0)}]"
        )
    assert (code, other_code) == (0, 0), stdout + stderr + other_stdout
    assert f"{address_of(0)} ({INTERFACE})" in stdout
    assert "joins all sites" in stdout
    assert "Mbit/s between sites 0 and 1" in stdout


@shaped
@needs_ipv6
@pytest.mark.slow
def test_a_machine_with_both_beside_one_with_ipv6_alone():
    with namespaces(2, SHAPED.rate_bit_per_s, 0.0) as names:
        add_ipv6(names, alone=1)
        (code, stdout, _), _ = on_two_machines(names, f"[{address_of(0)}]")
    assert code == 1
    assert "site 0 by IPv4, at 10.77.0.1, and site 1 by IPv6, at fd77::2" in " ".join(
        stdout.split()
    )


@pytest.mark.slow
def test_an_interrupt_while_waiting_is_quiet():
    port = free_port()
    process = start(*DOCTOR, "--sites", "2", "--rank", "0", "--master", f"127.0.0.1:{port}")
    with process:
        while not any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for connection in psutil.Process(process.pid).net_connections()
        ):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert stderr == "outergrad: interrupted\n"
