"""A job in NVFLARE's simulator: processes of a server and two clients, with their own network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nvflare_script import STEPS, loss_at, new_model

from outergrad.star.journal import verified

pytest.importorskip("nvflare", reason="nvflare is not installed")
pytestmark = pytest.mark.slow

SITES = ["site-1", "site-2"]
SCRIPT = Path(__file__).with_name("nvflare_script.py")
RUN = """
import sys
from outergrad.integrations.nvflare import star_job

script, args, workspace = sys.argv[1:]
star_job("star", script, args, min_clients=2).simulator_run(workspace, n_clients=2)
"""


def simulate(folder: Path, args: str) -> str:
    command = [sys.executable, "-c", RUN, str(SCRIPT), args, str(folder / "work")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


def pooled_losses() -> dict[str, list[float]]:
    """Of one program that has the data of both sites."""
    model, losses = new_model(), {site: [] for site in SITES}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        at = [loss_at(site, step, model) for site in SITES]
        (sum(at) / len(at)).backward()
        optimizer.step()
        for site, loss in zip(SITES, at, strict=True):
            losses[site].append(loss.item())
    return losses


def test_the_losses_of_a_job_are_those_of_pooled_data(tmp_path):
    told = simulate(tmp_path, f"%site% {tmp_path}")
    for site, pooled in pooled_losses().items():
        file = tmp_path / f"{site}.json"
        assert file.exists(), told
        assert json.loads(file.read_text()) == pytest.approx(pooled, rel=1e-12)
    (log,) = tmp_path.rglob("log.jsonl")
    lines = list(verified(log, log.with_name("hub.pem").read_text()))
    assert {"left"} < {line["what"] for line in lines}
    steps = [line for line in lines if line["what"] == "step"]
    assert steps[-1]["step"] == STEPS - 1
    assert all(line["sites"] == SITES for line in steps)
    assert not [
        *tmp_path.rglob("*.kit"),
        *tmp_path.rglob("hub.key"),
        *tmp_path.rglob("authority.key"),
    ]
