"""`outergrad hub` and `outergrad site`, from an empty folder to a training."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import outergrad as og
from outergrad.star.folder import HubFolder
from outergrad.star.server import HubServer
from outergrad.tools.commands.app import app

SCRIPT = """
import sys, torch, outergrad as og
model = torch.nn.Linear(3, 2)
session = og.distribute(model, og.DAD(), transport=og.Star())
for _ in range(3):
    model(torch.ones(4, 3)).sum().backward()
print("weight", model.weight.grad.sum().item(), sys.argv[1:])
"""


def invoke(*args: str):
    return CliRunner().invoke(app, [*map(str, args)])


@pytest.mark.slow
def test_from_init_to_training_to_the_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("hub", "init", "hub", "--address", "127.0.0.1:0").exit_code == 0
    for name in ("a", "b", "c"):
        assert invoke("hub", "invite", name).exit_code == 0
    assert os.stat("a.kit").st_mode & 0o777 == os.stat("hub/authority.key").st_mode & 0o777 == 0o600
    assert "a.kit is there" in invoke("hub", "invite", "a").stderr
    assert invoke("hub", "revoke", "c").exit_code == 0
    assert "no site 'd' was invited" in invoke("hub", "revoke", "d").stderr
    server = HubServer(HubFolder(tmp_path / "hub"), "127.0.0.1:0")
    assert server.names == ["a", "b"]
    server.start()
    told = json.loads((tmp_path / "b.kit").read_text())
    (tmp_path / "b.kit").write_text(json.dumps(told | {"hub": f"127.0.0.1:{server.port}"}))
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "outergrad", "site", "--kit", "b.kit", "train.py", "--fast"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        one = og.Star(f"127.0.0.1:{server.port}", kit="a.kit")
        take_part(one)
        out, err = process.communicate(timeout=60)
        assert "weight 72.0 ['--fast']" in out, err
        one.close()
    finally:
        process.kill()
        server.stop()
    verified = invoke("hub", "verify")
    assert "run 1: a, b: 3 steps" in verified.stdout
    change(tmp_path / "hub" / "log.jsonl")
    assert "line 6 of the log was not signed" in invoke("hub", "verify").stderr


def take_part(one):
    import torch

    model = torch.nn.Linear(3, 2)
    session = og.distribute(model, og.DAD(), transport=one)
    for _ in range(3):
        model(torch.ones(4, 3)).sum().backward()
    session.detach()


def change(log):
    lines = log.read_text().splitlines()
    lines[5] = lines[5].replace("joined", "joinee")
    log.write_text("\n".join(lines) + "\n")


def test_where_a_hub_cannot_listen_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("hub", "init", "hub", "--address", "127.0.0.1:0")
    invoke("hub", "invite", "a")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for listen, why in {
            f"127.0.0.1:{port}": "Address already in use",
            f"[::]:{port}": "Address already in use",
            "no-such-machine.invalid:1": "the name is not known here",
        }.items():
            told = invoke("hub", "serve", "--listen", listen).stderr.strip()
            assert told == f"outergrad: cannot listen on {listen} ({why}): use another --listen"
