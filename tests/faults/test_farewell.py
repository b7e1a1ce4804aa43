"""A site whose program ends says why: the others would only see its connections closed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from weakref import WeakKeyDictionary

import pytest
import torch.distributed as dist
from torch import nn

import outergrad as og
from outergrad.comm.failure_mailbox import FailureMailbox
from outergrad.comm.failure_report import FailureReport
from outergrad.session import farewell as _farewell
from outergrad.step.transport_state import TransportState, on_transport
from ranks import run_ranks

# Forked, so that PyTorch is imported once; each process goes through Python's own end.
PROGRAM = """
import gc, os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, torch._dynamo
import outergrad as og

FOLDER, *SCENES = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)
sites = [(scene, rank) for scene in SCENES for rank in range(3)]
gc.freeze()  # a child would copy every page that the collector writes to
for scene, rank in sites:
    if os.fork() == 0:
        break
else:
    for _ in sites:
        os.wait()
    sys.exit()
place = os.path.join(FOLDER, scene)
for fd, kind in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{place}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
VICTIM, END, STORE, PORT = scene.split("-")
VICTIM, PORT = int(VICTIM), int(PORT)

def say(line):
    os.write(1, line.encode() + b"\\n")  # at once: the others write there, too

def said(kind, error, trace):
    say(f"{rank} hook {kind.__name__}")
    sys.__excepthook__(kind, error, trace)

def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    og.distribute(model, timeout=60.0)
    for step in range(6):
        if rank == VICTIM and step == 4:
            say(f"{rank} ends {time.monotonic()}")
            if END == "raise":
                raise ValueError("no rows in" + chr(27) + "[2J part 7" + chr(10) + "second line")
            if END == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            sys.exit(3)
        model(torch.ones(2, 6) + rank).sum().backward()

sys.excepthook = said
torch.set_num_threads(1)
if STORE == "tcp":
    store = dist.TCPStore("127.0.0.1", PORT, 3, rank == 0, timedelta(seconds=30))
else:
    store = dist.FileStore(f"{place}.store", 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
try:
    train()
except og.SiteLostError as error:
    say(f"{rank} lost {error.sites} {time.monotonic()} {error}")
finally:
    if STORE != "tcp":
        dist.destroy_process_group()
"""
SAID = {
    "raise": "it ended with ValueError: no rows in [2J part 7 second line",
    "interrupt": "it ended with Ctrl-C",
    "exit": "its session had ended, after 4 steps",
}


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


SCENES = [(2, "raise", "file"), (1, "interrupt", "tcp"), (2, "exit", "file"), (0, "raise", "tcp")]


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[tuple[int, str, str], tuple[str, str]]:
    """What the sites of each scene printed."""
    folder = tmp_path_factory.mktemp("said")
    names = {scene: "-".join(map(str, (*scene, free_port()))) for scene in SCENES}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(folder), *names.values()]
    subprocess.run(command, env=env, check=True, timeout=90)
    return {
        scene: ((folder / f"{name}.out").read_text(), (folder / f"{name}.err").read_text())
        for scene, name in names.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "end", "store"), SCENES)
def test_the_others_are_told_how_a_program_ended(victim, end, store, said):
    """Also where it destroys its process group first, and where the store ends with it."""
    out, err = said[victim, end, store]
    lost = re.findall(r"^(\d) lost \((\d),\) ([\d.]+) (.*)$", out, re.MULTILINE)
    assert {int(rank) for rank, *_ in lost} == {0, 1, 2} - {victim}, out + err
    ended_s = float(re.findall(r"ends ([\d.]+)", out)[0])
    for _, site, at_s, words in lost:
        assert int(site) == victim
        assert f"site {victim} left word that {SAID[end]}" in words
        assert float(at_s) - ended_s < 30.0
    if end != "exit":
        name = {"raise": "ValueError", "interrupt": "KeyboardInterrupt"}[end]
        assert f"{victim} hook {name}" in out
        assert f"{name}" in err
        assert "Traceback" in err


@pytest.fixture
def hook(monkeypatch):
    """What users have for `sys.excepthook`."""
    seen = []
    monkeypatch.setattr(_farewell, "_before", [])
    monkeypatch.setattr(_farewell, "_farewells", WeakKeyDictionary())
    monkeypatch.setattr(sys, "excepthook", lambda *about: seen.append(about))
    return seen


def test_the_hook_goes_with_the_last_session(hook):
    before = sys.excepthook

    def body(rank, group):
        sessions = [og.distribute(nn.Linear(3, 2), group=group) for _ in range(2)]
        for session in sessions:
            assert sys.excepthook is not before
            session.detach()

    run_ranks(2, body)
    assert sys.excepthook is before


def test_an_error_is_told_once_and_then_as_ever(hook):
    """But not by a site that has lost the others: it has left word of that."""
    store = dist.HashStore()

    class Comm:
        world_size, rank, host, key = 2, 1, 0, nn.Linear(1, 1)

        def notes(self, session):
            return FailureMailbox(store, 1, 2, session)

    comm, error = Comm(), ValueError("mine")
    _farewell.say_farewell(comm, 7)
    sys.excepthook(ValueError, error, None)
    assert hook == [(ValueError, error, None)]
    left = FailureReport.of(store.get("outergrad/last_words/1/exit").decode())
    assert (left.why, left.ended) == ("ValueError: mine", "process")
    store.delete_key("outergrad/last_words/1/exit")
    on_transport(comm.key).lost = og.SiteLostError("", (0,), 0, "")
    sys.excepthook(ValueError, error, None)
    assert not store.check(["outergrad/last_words/1/exit"])
    assert len(hook) == 2


def test_a_forked_process_leaves_no_word(hook, monkeypatch):
    store, sessions = dist.HashStore(), TransportState()
    farewell = _farewell.Farewell(sessions, FailureMailbox(store, 0, 2, 7), 7)
    before = store.num_keys()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    farewell.end_session()
    farewell.end_process("ValueError", None)
    assert store.num_keys() == before
    monkeypatch.undo()
    farewell.end_session()
    assert store.num_keys() == before + 1
