"""A program that ends tells its recorders, whether it detaches its session or not."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from outergrad.record.recorders import Ending

PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch import nn
import outergrad as og
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = nn.Linear(3, 2)
session = og.distribute(net, recorder=og.JSONL(sys.argv[1]))
for _ in range(3):
    net(torch.ones(1, 3)).sum().backward()
if sys.argv[2] == "detach":
    session.detach()
if sys.argv[2] == "raise":
    raise ValueError("no data")
if sys.argv[2] == "leave":
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error"), [("return", ""), ("detach", ""), ("leave", ""), ("raise", "ValueError")]
)
def test_the_last_line_says_that_a_program_ended(tmp_path, how, error):
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), how], capture_output=True)
    lines = [json.loads(line) for line in (tmp_path / "site-0.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines].count("end") == 1
    assert lines[-1]["event"] == "end"
    assert (lines[-1]["step"], lines[-1]["error"]) == (3, error)


class Closed:
    def __init__(self):
        self.errors = []

    def close(self, error=""):
        self.errors.append(error)


def test_what_was_closed_or_is_gone_is_not_closed_at_exit():
    kept, gone = Closed(), Closed()
    endings = [Ending(kept), Ending(gone)]
    for ending in endings:
        ending.expect()
    del gone
    gc.collect()
    for ending in endings:
        ending._exit()
        ending.cancel()
    assert kept.errors == [""]


def test_an_error_at_a_prompt_ends_nothing(monkeypatch):
    closed = Closed()
    monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    Ending(closed)._exit()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    Ending(closed)._exit()
    assert closed.errors == ["ValueError", ""]
