"""The files of deploy/: each command in them and their pages exists; what can run here runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time

import click
import pytest
import typer
from typer.testing import CliRunner

from outergrad.tools.commands.app import app
from places import REPOSITORY

yaml = pytest.importorskip("yaml")
DEPLOY, DOCS = REPOSITORY / "deploy", REPOSITORY / "docs"
UNITS = sorted(DEPLOY.glob("*.service"))
PAGES = ["institutions.md", "slurm.md", "kubernetes.md", "nvflare.md"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PREPARE = COMPOSE["services"]["prepare"]["command"][0]
OUTERGRAD = [sys.executable, "-m", "outergrad"]


def commands() -> list[str]:
    """All lines with outergrad's own commands."""
    found = [" ".join(s["command"]) for s in COMPOSE["services"].values() if "entrypoint" not in s]
    found += re.findall(r"outergrad (.+)", PREPARE)
    for unit in UNITS:
        found += re.findall(
            r"^ExecStart=/opt/outergrad/bin/outergrad (.+)$", unit.read_text(), re.M
        )
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), re.S):
            said = block.replace("\\\n", " ")
            found += re.findall(
                r"(?:^|[/ ])outergrad ((?:hub|site|doctor|plan|train) .+)", said, re.M
            )
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one_that_there_is(line):
    command, words = typer.main.get_command(app), shlex.split(line, comments=True)
    context = click.Context(command)
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, words)
        words = [*context.protected_args, *context.args]


def test_all_units_and_files_of_the_pages_are_there():
    told = "".join((DOCS / page).read_text() for page in PAGES)
    named = set(re.findall(r"deploy/([\w.-]+)", told))
    assert named == {file.name for file in DEPLOY.iterdir() if file.is_file()}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_the_units(unit, tmp_path):
    own = tmp_path / unit.name
    own.write_text(unit.read_text().replace("/opt/outergrad/bin/outergrad", "/bin/true"))
    verify = ["systemd-analyze", "verify", "--man=no", str(own)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60)
    assert unit.name not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_pods_of_kubernetes_meet_at_the_first():
    service, job = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert f"--master-addr={first}" in container["args"]
    assert f"--nnodes={spec['completions']}" in container["args"]
    assert spec["parallelism"] == spec["completions"]
    assert spec["completionMode"] == "Indexed"


def test_the_image_has_what_is_copied_into_it():
    sources = re.findall(r"^COPY (.+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    for line in sources:
        assert all((REPOSITORY / name).exists() for name in line.split()[:-1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
def test_the_sites_of_the_compose_file_end_with_the_same_weights(tmp_path, monkeypatch):
    """Its commands, as processes of this machine."""
    port, environment = free_port(), {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(words: list[str], **settings) -> subprocess.Popen:
        words = [word.replace("/scripts", str(DEPLOY)) for word in words]
        return subprocess.Popen([*OUTERGRAD, *words], cwd=tmp_path, env=environment, **settings)

    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"outergrad (.+)", PREPARE):
        words = line.replace("hub:8443", f"127.0.0.1:{port}").split()
        assert CliRunner().invoke(app, words).exit_code == 0
    services = COMPOSE["services"]
    hub = start([*services["hub"]["command"], "--listen", f"127.0.0.1:{port}"])
    try:
        sites = [
            start(services[name]["command"], stdout=subprocess.PIPE, text=True)
            for name in ("hospital-a", "hospital-b")
        ]
        told = [site.communicate(timeout=90)[0] for site in sites]
    finally:
        hub.terminate()
        hub.wait(30)
    assert [site.returncode for site in sites] == [0, 0]
    sums = {line.rpartition(" ")[2] for line in told}
    assert len(sums) == 1, told


SRUN = """
shift
"$@" & one=$!
"$@" & other=$!
wait $one && wait $other
"""
SITE = """
import sys
import torch, torch.distributed as dist
import outergrad as og

dist.init_process_group("gloo")
model = torch.nn.Linear(3, 1)
og.distribute(model, og.DAD())
model(torch.ones(2, 3) * dist.get_rank()).sum().backward()
sys.stdout.write(f"gradient {model.weight.grad.tolist()}\\n")  # in one write: both write there
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_slurm_script_starts_a_site_on_each_node(tmp_path):
    """With an srun that starts both on this machine."""
    torchrun = f'exec {sys.executable} -m torch.distributed.run "$@"'
    stubs = {"srun": SRUN, "scontrol": "echo localhost", "torchrun": torchrun}
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(SITE)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "1"}
    slurm["SLURM_JOB_ID"] = str(int(time.time()))
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, **slurm, "PATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    command = ["bash", str(DEPLOY / "slurm.sh"), str(tmp_path / "train.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradient [[1.0, 1.0, 1.0]]") == 2, done.stdout
