"""Whole runs of ``outergrad bench``: what they measure, and what they leave when they are ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from forked import forked_processes
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad.tools.commands.app import app
from outergrad_lab.bench.trainer import Phases

MISSING = what_is_missing(ShapedLink(rate_bit_per_s=1e8), 3)
shaped = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
pytestmark = pytest.mark.slow

DEEP_MLP_BYTES = 4 * 437_914
METHODS = ("alone", "ddp", "powersgd-2", "dense", "dad")


def bench(path: Path, *args: str):
    """Runs the command in this process; returns what it said, and the links in its file."""
    with forked_processes():
        result = CliRunner().invoke(app, ["bench", "--out", str(path), *args])
    assert result.exit_code == 0, result.stderr
    return result.stdout, json.loads(path.read_text())["links"]


def namespaces_of(pid: int) -> list[Path]:
    return list(Path("/var/run/netns").glob(f"outergrad-{pid}-*"))


@shaped
@pytest.mark.alone
def test_a_shaped_link_carries_what_the_model_weighs_and_no_faster_than_its_rate(tmp_path):
    for _ in range(5):  # on a busy machine the link seems slower
        said, (link,) = bench(
            tmp_path / "a.json",
            *("--workload", "deep-mlp", "--methods", ",".join(METHODS), "--link", "100mbit"),
            *("--steps", "2", "--rounds", "1", "--check", "--data-dir", "none"),
        )
        rate = link["probe"]["rate_bit_per_s"]
        assert rate < 1.15 * 9.5e7
        if rate > 0.85 * 9.5e7:
            break
    assert rate == pytest.approx(9.5e7, rel=0.15)
    timings = {timing["method"]: timing for timing in link["timings"]}
    assert tuple(timings) == METHODS
    for timing in timings.values():
        assert timing["median_s"] > 0.98 * timing["sent_bytes"] * 8 / 1e8
        assert len(timing["sent_bytes_by_site"]) == 2
    ddp, dense, dad = (timings[method] for method in ("ddp", "dense", "dad"))
    ring_bytes = 2 * (2 - 1) / 2 * DEEP_MLP_BYTES
    assert ddp["payload_bytes"] == pytest.approx(ring_bytes, rel=0.02)
    assert 1.0 < ddp["sent_bytes"] / ring_bytes < 1.1  # 66 bytes of headers in 1514, and the ACKs
    assert dense["sent_bytes"] == pytest.approx(ddp["sent_bytes"], rel=0.03)
    assert dad["sent_bytes"] < ddp["sent_bytes"] / 2
    assert timings["powersgd-2"]["sent_bytes"] < ddp["sent_bytes"] / 20
    assert timings["alone"]["sent_bytes"] < 1000
    assert list(dad["phases_s"]) == Phases.names()
    assert said.count("session.stats() says") == said.count("agrees with") == 2
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert not namespaces_of(os.getpid())


def test_on_loopback_methods_train_to_a_loss(tmp_path, data_dir):
    said, (link,) = bench(
        tmp_path / "a.json",
        *("--workload", "deep-mlp", "--methods", "alone,ddp,dad", "--link", "loopback"),
        *("--until-loss", "2", "--max-steps", "60", "--data-dir", str(data_dir)),
    )
    assert "UNSHAPED, loopback" in said
    assert "Note: loopback is not shaped" in said
    assert link["data"] == "mnist-512"
    assert not link["timings"]
    _alone, ddp, dad = link["arrivals"]
    assert dad["reached"]
    assert dad["loss"] <= 2
    assert (dad["steps"], dad["loss"]) == (ddp["steps"], pytest.approx(ddp["loss"], rel=0.01))
    assert ddp["sent_bytes"] > ddp["steps"] * DEEP_MLP_BYTES
    assert [mark["steps"] for mark in dad["way"]] == list(range(20, dad["steps"] + 1, 20))


MINE = """
import torch
from torch import nn


def make(rows):
    return nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 9)), torch.randn(rows, 60)
"""


def test_a_model_of_ones_own_is_measured(tmp_path, monkeypatch):
    (tmp_path / "my_measured.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    said, (link,) = bench(
        tmp_path / "a.json",
        *("--model", "my_measured:make", "--rows", "3", "--methods", "ddp,dad,rank-dad-1"),
        *("--link", "loopback", "--rounds", "1", "--steps", "2"),
    )
    assert link["data"] == "its own"
    claimed = {timing["method"]: timing["claimed_bytes"] for timing in link["timings"]}
    assert claimed["dad"] == pytest.approx(4 * 3 * (60 + 50 + 50 + 9), rel=0.25)
    assert claimed["rank-dad-1"] < claimed["dad"]
    assert "my_measured:make, 2 sites" in said


def sent_bytes(process: psutil.Process) -> int:
    """What has left by the interface of a site; 0 before it has got there."""
    try:
        table = Path(f"/proc/{process.pid}/net/dev").read_text()
    except OSError:
        return 0
    counters = re.search(r"\blink0: *(.*)", table)
    return int(counters[1].split()[8]) if counters else 0


def command_of(process: psutil.Process) -> str:
    """Nothing for a process that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


class Run:
    """The command in a process of its own, with a folder for what it leaves."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.results = folder / "a.json"

    def sites(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "spawn_main" in command_of(child)]

    def wait_for(self, happened) -> None:
        while not happened():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def end(self, number: int, whom: int) -> tuple[int, str]:
        """Sends a signal; returns the exit code, and the one line that was told.

        Fails if a process, a namespace or a temporary file is left.
        """
        children = psutil.Process(self.process.pid).children(recursive=True)
        os.kill(whom, number)
        _, stderr = self.process.communicate(timeout=30)
        assert not psutil.wait_procs(children, timeout=30)[1]
        assert not namespaces_of(self.process.pid)
        assert not list((self.folder / "tmp").glob("outergrad-*"))
        assert "Traceback" not in stderr
        (line,) = [line for line in stderr.splitlines() if "outergrad" in line]
        return self.process.returncode, line


@contextmanager
def long_run(folder: Path, links: str):
    """A run whose last link is too slow to end."""
    (folder / "tmp").mkdir()
    args = ["--workload", "deep-mlp", "--methods", "ddp", "--rounds", "1", "--data-dir", "none"]
    args += ["--out", str(folder / "a.json"), "--link", links]
    args += ["--steps", "1000000" if links == "loopback" else "1"]
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    # A test run in the background ignores interrupts, and so would what it starts.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, "-m", "outergrad", "bench", *args]
    with subprocess.Popen(words, preexec_fn=heed, env=env, **pipes) as process:
        try:
            yield Run(process, folder)
        finally:
            process.kill()


@shaped
def test_an_interrupt_leaves_nothing_but_the_results_of_the_links_done(tmp_path):
    with long_run(tmp_path, "none,100kbit") as run:
        run.wait_for(run.results.exists)
        run.wait_for(lambda: max(map(sent_bytes, run.sites()), default=0) > 5_000)
        assert run.end(signal.SIGINT, run.process.pid) == (130, "outergrad: interrupted")
    (link,) = json.loads(run.results.read_text())["links"]
    assert link["link"] == "none"
    assert link["timings"][0]["sent_bytes"] > DEEP_MLP_BYTES


@pytest.mark.parametrize("links", [pytest.param("100kbit", marks=shaped), "loopback"])
def test_a_request_to_end_leaves_nothing(tmp_path, links):
    with long_run(tmp_path, links) as run:
        run.wait_for(lambda: len(run.sites()) == 2)
        assert run.end(signal.SIGTERM, run.process.pid) == (143, "outergrad: ended by SIGTERM")
    assert not run.results.exists()


@shaped
def test_a_site_that_dies_is_named(tmp_path):
    with long_run(tmp_path, "100kbit") as run:
        run.wait_for(lambda: min(map(sent_bytes, run.sites()), default=0) > 5_000)
        told = "outergrad: site 1 was ended by SIGKILL"
        assert run.end(signal.SIGKILL, run.sites()[1].pid) == (1, told)
