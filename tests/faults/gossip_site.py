"""A site of gossip's fault harness: it trains, meets with its fault, and writes down every move."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gossip_trials import HOW, STEPS, GossipTrial
from torch import nn
from torch.optim import SGD

import outergrad as og
from outergrad.core.transport import Letter, Lines
from outergrad.launch.simulate import gloo_group
from outergrad.messages.letters import Head, LetterKind
from outergrad.session.edge_rounds import Edge

ROUNDS = 80
"""Of the average by rounds at the end."""
_RATE = 0.02
_BEGINS_S, _SETTLES_S, _ENDS_S = 30.0, 40.0, 60.0
"""Longest time of a message when sites begin, when they settle, and until all have ended."""
Tell = Callable[..., None]


def run_site(trial: GossipTrial, rank: int, folder: Path, address: str, tell: Tell) -> None:
    """The whole life of a site; what it tells is judged (`gossip_judge.py`)."""
    torch.set_num_threads(1)
    moves = _Moves(folder / f"{trial.number}-{rank}.moves")
    torch.manual_seed(trial.number)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    logged = _Logged()
    logging.getLogger("outergrad").addHandler(logged)
    way = _way(trial, rank, folder, address)
    method = og.Gossip(trial.graph, HOW[trial.how])
    session = og.distribute(model, method, timeout=timedelta(seconds=_BEGINS_S), **way)
    updates = session._updates
    updates._at.comm.patience_s = trial.timeout_s
    fault = _Fault(trial, tell) if rank == trial.victim else None
    if fault is not None and updates._part._lines is not None:
        updates._part._lines = _Hooked(updates._part._lines, fault)
        moves.then = lambda: fault.reaches("moved")
    _differ(model, rank)
    np.save(folder / f"{trial.number}-{rank}-start.npy", _flat(model))
    own, losses = _train(trial, rank, model, fault)
    updates._at.comm.patience_s = _SETTLES_S
    updates.level()
    np.save(folder / f"{trial.number}-{rank}-own.npy", own)
    np.save(folder / f"{trial.number}-{rank}-trained.npy", _flat(model))
    settled = moves.count
    tell("trained", losses=losses, settled=settled, took_part=session.stats().took_part)
    if fault is not None:
        fault.step = STEPS if trial.moment == "averaging" else fault.step
    session.average(rounds=ROUNDS)
    updates.level()
    np.save(folder / f"{trial.number}-{rank}-averaged.npy", _flat(model))
    closed = (
        {int(s): updates._part._lines.why_closed(s) for s in updates._part._edges}
        if updates._part._lines
        else {}
    )
    tied = [int(site) for site, edge in updates._part._edges.items() if edge.is_free]
    tell("averaged", closed=closed, free=tied, log=logged.told)
    session.detach()
    tell("over")
    _wait_for(folder / f"{trial.number}-over")


def _way(trial: GossipTrial, rank: int, folder: Path, address: str) -> dict[str, Any]:
    if trial.way == "gloo":
        store = dist.FileStore(str(folder / f"{trial.number}.store"), trial.sites)
        return {"group": gloo_group(store, rank, trial.sites, timedelta(seconds=60))}
    kit = folder / f"{trial.number}-hub" / f"site-{rank}.kit"
    return {"transport": og.Star(address, kit=kit, blind=trial.way == "blind star", wait_s=60)}


@torch.no_grad()
def _differ(model: nn.Module, rank: int) -> None:
    """Gives the site weights of its own."""
    drawn = torch.Generator().manual_seed(rank)
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=drawn, dtype=p.dtype), alpha=0.3)


def _train(
    trial: GossipTrial, rank: int, model: nn.Module, fault: _Fault | None
) -> tuple[np.ndarray, list[float]]:
    """Trains; returns the sum of the site's own steps, and its losses."""
    optimizer, losses = SGD(model.parameters(), lr=_RATE), list[float]()
    own = np.zeros_like(_flat(model))
    drawn = torch.Generator().manual_seed(rank)
    x = torch.randn(32, 5, generator=drawn, dtype=torch.float64)
    for step in range(STEPS):
        if fault is not None and trial.moment != "averaging":
            fault.begin(step)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :2].tanh()).square().mean()
        loss.backward()
        losses.append(loss.item())
        grads = [p.grad.view(-1) for p in model.parameters() if p.grad is not None]
        own -= _RATE * torch.cat(grads).numpy()
        optimizer.step()
        time.sleep(0.005)
    return own, losses


def _flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().copy()


class _Moves:
    """A file with each move: the neighbour, the number of the round, and the change of weights."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.count, self.then = 0, lambda: None
        hear = Edge.hear

        def heard(edge: Edge, letter: Letter) -> tuple[float, list[torch.Tensor]]:
            share, difference = hear(edge, letter)
            change = torch.cat([share * d.reshape(-1) for d in difference]).double().numpy()
            os.write(self._fd, np.concatenate(([int(edge.site), edge.done], change)).tobytes())
            self.count += 1
            self.then()
            return share, difference

        Edge.hear = heard  # type: ignore[method-assign]


class _Logged(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


class _Fault:
    """What happens to this site, once it reaches the place of it."""

    def __init__(self, trial: GossipTrial, tell: Tell) -> None:
        self._trial, self._tell, self._left = trial, tell, trial.index
        self.step, self._at = trial.step, -1
        self.letter: Letter | None = None
        if trial.kind == "damage":
            self._damage_heads()

    def begin(self, step: int) -> None:
        """Notes that a step begins."""
        self._at = step
        if step == self.step and self._trial.moment in ("before", "any"):
            self.happen()

    def reaches(self, moment: str, letter: Letter | None = None) -> None:
        """Notes a place in a step."""
        averaging = self._trial.moment == "averaging" and self.step == STEPS
        here = 0 <= self.step <= self._at and moment == self._trial.moment
        if not here and not (averaging and moment == "sent"):
            return
        if self._left:
            self._left -= 1
            return
        self.letter = letter
        self.happen()

    def happen(self) -> None:
        """Lets it happen, once."""
        trial, self.step = self._trial, -1
        if trial.kind != "damage":
            self._tell("injected")
        if trial.moment == "any" and trial.kind in ("kill", "stop"):
            return  # the harness sends the signal
        if trial.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trial.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif trial.kind == "late":
            time.sleep(trial.pause_s)
        elif trial.kind == "cut":
            cut_connections(only_one=trial.way == "gloo")

    def _damage_heads(self) -> None:
        about, trial, tell = Head.about, self._trial, self._tell

        def damaged(session: int, kind: LetterKind, letter: Letter, arrived: int) -> Head:
            head = about(session, kind, letter, arrived)
            if self.letter is None or letter is not self.letter:
                return head
            self.letter = None
            tell("injected")
            wrong = {"check": head.check ^ 1, "number": -1, "share": -0.5, "session": session ^ 1}
            return head._replace(**{trial.field: wrong[trial.field]})

        Head.about = staticmethod(damaged)  # type: ignore[method-assign]


class _Hooked(Lines):
    """Lines that tell of each letter before it is sent and awaited."""

    def __init__(self, lines: Lines, fault: _Fault) -> None:
        self._lines, self._fault = lines, fault

    def send(self, site: int, letter: Letter) -> None:
        if self._fault._trial.kind == "damage":
            self._fault.reaches("sent", letter)
        self._lines.send(site, letter)
        if self._fault._trial.kind != "damage":
            self._fault.reaches("sent")

    def next(self, site: int, until: float) -> Letter | None:
        if until:
            self._fault.reaches("hearing")
        return self._lines.next(site, until)

    def why_closed(self, site: int) -> str:
        return self._lines.why_closed(site)

    def close(self) -> None:
        self._lines.close()


def cut_connections(*, only_one: bool) -> None:
    """Shuts the TCP connections of this process, or one of them."""
    for entry in sorted(Path("/proc/self/fd").iterdir(), key=lambda entry: -int(entry.name)):
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                one.shutdown(socket.SHUT_RDWR)
                if only_one:
                    return


def _wait_for(path: Path) -> None:
    until = time.monotonic() + _ENDS_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
