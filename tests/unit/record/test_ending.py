"""A program that ends tells its recorders, whether it detaches its session or not."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from outergrad.record.recorders import Ending

# Forked, so that PyTorch is imported once; each process goes through Python's own end.
PROGRAM = """
import gc, os, sys
import torch, torch.distributed as dist
from torch import nn
import outergrad as og
gc.freeze()  # a child would copy every page that the collector writes to
for how in sys.argv[2:]:
    if os.fork() == 0:
        break
else:
    for _ in sys.argv[2:]:
        os.wait()
    sys.exit()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = nn.Linear(3, 2)
session = og.distribute(net, recorder=og.JSONL(os.path.join(sys.argv[1], how)))
for _ in range(3):
    net(torch.ones(1, 3)).sum().backward()
if how == "detach":
    session.detach()
if how == "raise":
    raise ValueError("no data")
if how == "leave":
    sys.exit(3)
"""


ERRORS = {"return": "", "detach": "", "leave": "", "raise": "ValueError"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of what each program has recorded."""
    folder = tmp_path_factory.mktemp("ended")
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder), *ERRORS], capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("how", "error"), ERRORS.items())
def test_the_last_line_says_that_a_program_ended(ended, how, error):
    told = (ended / how / "site-0.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in told]
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
