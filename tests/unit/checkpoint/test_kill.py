"""Sites that are ended by SIGKILL, and supervised trainings that go on from the last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import outergrad as og
from forked import forked_processes
from outergrad.checkpoint import folder as files
from outergrad.launch.start import start_sites
from outergrad.launch.supervise import Attempt, Restarts, supervise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 9
KILLS = {"a step": (1, 3), "a write": (0, 6)}
"""What is interrupted at which site, and after how many steps."""


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(14, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 10))


class Run:
    """Three ways to share gradients, in one model."""

    def __init__(self, folder: Path):
        torch.manual_seed(7 + dist.get_rank())
        self.model = nn.ModuleDict({name: layers() for name in ("dad", "rank_dad", "powersgd")})
        methods = {
            "dad.*": og.DAD(),
            "rank_dad.*": og.RankDAD(rank=2, min_ratio=1.0),
            "powersgd.*": og.PowerSGD(rank=2, min_ratio=1.0),
        }
        self.session = og.distribute(self.model, og.PerLayer(methods))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.checkpoints = og.Checkpoints(
            folder, self.session, model=self.model, optimizer=self.optimizer
        )

    def step(self) -> list[float]:
        self.optimizer.zero_grad()
        x = torch.randn(6, 14)
        losses = [part(x).square().mean() for part in self.model.values()]
        sum(losses).backward()
        self.optimizer.step()
        return [loss.item() for loss in losses]


def training(folder: Path, attempt: Attempt) -> bool:
    """Trains to the end, or is killed where that has not happened before."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    files.write = partial(write_or_die, folder, rank, files.write)
    run = Run(folder / "saved")
    restored = run.checkpoints.restore()
    start = restored.step if restored else 0
    with (folder / f"losses-{rank}").open("a") as told:
        for step in range(start, STEPS):
            print(json.dumps([step, run.step()]), file=told, flush=True)
            if step + 1 == KILLS["a step"][1] and rank == KILLS["a step"][0]:
                die_once(folder / "killed in a step")
            if (step + 1) % 2 == 0:
                run.checkpoints.save(step + 1)
    whole = Run(folder / "whole")
    (folder / f"whole-{rank}").write_text(json.dumps([whole.step() for _ in range(STEPS)]))
    return True


def write_or_die(folder: Path, rank: int, write, path: Path, value) -> None:
    site, step = KILLS["a write"]
    if rank == site and path.name == f"site-{site}.pt" and f"step-{step:08}" in str(path):
        unfinished = path.with_name(".half")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(b"half")
        die_once(folder / "killed in a write")
    write(path, value)


def die_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_sites_go_on_to_the_bit(tmp_path):
    said = []

    def run(attempt: Attempt) -> bool:
        return all(start_sites(partial(training, tmp_path, attempt), attempt.sites))

    with forked_processes():
        supervise(run, 2, Restarts(max_restarts=2), said.append)
    assert said == [
        "site 1 was ended by SIGKILL; starting again (restart 1 of 2)",
        "site 0 was ended by SIGKILL; starting again (restart 2 of 2)",
    ]
    for rank in range(2):
        whole = json.loads((tmp_path / f"whole-{rank}").read_text())
        told = (tmp_path / f"losses-{rank}").read_text()
        lines = [json.loads(line) for line in told.splitlines()]
        assert [step for step, _ in lines].count(2) == 2, "it went back to the last checkpoint"
        assert {step for step, _ in lines} == set(range(STEPS))
        assert all(losses == whole[step] for step, losses in lines)


def test_torchrun_starts_a_killed_site_again_and_it_goes_on(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "2", "-m", "outergrad", "train"]
    options = ["--widths", "24", "--epochs", "12", "--batch-size", "60"]
    options += ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "5"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*torchrun, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        try:
            kill_one_when(process, tmp_path / "saved")
            result, said = process.communicate(timeout=250)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert "going on after step" in said
    assert result.startswith("dad on digits, 2 sites"), "the job is done"


def kill_one_when(process: subprocess.Popen, folder: Path) -> None:
    """Kills a site as soon as the first checkpoint is whole."""
    end = time.monotonic() + 200
    while not any(len(list(save.glob("site-*.pt"))) == 2 for save in folder.glob("step-*")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    sites = [
        child for child in psutil.Process(process.pid).children() if "outergrad" in child.cmdline()
    ]
    sites[-1].kill()
