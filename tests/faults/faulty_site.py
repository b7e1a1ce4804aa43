"""What one site of a trial does, in a process of its own, and how it meets with its fault."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam
from trials import METHODS, Trial, batch, build

import outergrad as og
import outergrad.comm.process_group
from outergrad.comm.board import StoreBoard
from outergrad.comm.torch import SEND, TorchComm
from outergrad.comm.work import tag_of
from outergrad.commit.digests import Digests
from outergrad.commit.participant import CommitParticipant
from outergrad.core.errors import BoardGoneError, ExchangeError
from outergrad.messages.vote import WORDS
from outergrad.step.transport_state import on_transport

Tell = Callable[..., None]
"""Writes a line of what happened, with its time."""
VOTE_LANE = 2
NEWCOMER_S = 1.0
"""The timeout of a process group that a site makes alone; PyTorch tries five times as long."""


class InjectedError(Exception):
    """The backward of the user's model fails."""


class Injector:
    """Brings a fault about on the site whose turn it is."""

    def __init__(self, trial: Trial, rank: int, address: str, tell: Tell) -> None:
        own = [fault for fault in trial.faults if fault.victim == rank]
        self.fault, self.mine = own[0] if own else trial.fault, bool(own)
        self._busy_s = trial.busy_s * trial.timeout_s if rank == trial.busy else 0.0
        self._busy_step, self._store = trial.fault.step, int(address.rsplit(":", 1)[1])
        self._timeout_s, self._tell = trial.timeout_s, tell
        self.fired, self._sent, self._received = False, 0, 0
        self._fired_in_step = False
        self.armed = self.mine and self.fault.moment == "distribute"
        self.is_bad = False
        """Whether the next loss is not finite."""

    def begin(self, step: int) -> None:
        """A step begins."""
        self.armed = self.mine and not self.fired and step == self.fault.step
        self._sent = self._received = 0
        self._fired_in_step = False
        if self.armed and self.fault.moment == "any":
            threading.Timer(self.fault.after_s, self.fire).start()
        self.at("forward")

    def evaluate(self, step: int) -> None:
        """What a site does between two steps, which may take long."""
        if step == self._busy_step:
            time.sleep(self._busy_s)

    def at(self, moment: str) -> None:
        """The site has come to some place of its step."""
        if self.armed and self.fault.moment == moment:
            self.fire()

    def message(self) -> None:
        """It is about to send one."""
        index, self._sent = self._sent, self._sent + 1
        if index == self.fault.index:
            self.at("message")
            self.at("distribute")

    def heads(self) -> None:
        """It is about to exchange headers: behind the fault all sites throw away what came."""
        if self._fired_in_step:
            self._tell("began again")

    def corrupts(self, kind: str) -> bool:
        """Whether what arrives now is to be changed."""
        if not (self.armed and self.fault.kind == "corrupt" and self.fault.moment == kind):
            return False
        index, self._received = self._received, self._received + 1
        return kind != "payload" or index == self.fault.index

    def fire(self) -> None:
        """Now."""
        if self.fired or not hasattr(self, f"_{self.fault.kind.replace(' ', '_')}"):
            return
        self._note()
        getattr(self, f"_{self.fault.kind.replace(' ', '_')}")()
        self._tell("went on")

    def _note(self) -> None:
        self.fired, self.armed, self._fired_in_step = True, False, True
        self._tell("injected")

    note = _note

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _restart = _kill

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def _raise(self) -> None:
        raise InjectedError

    def _delay(self) -> None:
        time.sleep(self.fault.delay_s * self._timeout_s)

    _long_delay = _brief_delay = _twin = _delay

    def _nan(self) -> None:
        self.is_bad = True

    def _leave(self) -> None:
        raise SystemExit(0)

    def _reset(self) -> None:
        """Closes the connection to one other site, while both live."""
        found = [sock for fd in os.listdir("/proc/self/fd") if (sock := self._connection(int(fd)))]
        for sock in found[self.fault.index % len(found) :][:1]:
            sock.shutdown(socket.SHUT_RDWR)
            self._tell("reset")
        for sock in found:
            sock.close()

    def _connection(self, fd: int) -> socket.socket | None:
        """A copy of a file descriptor that is a connection to another site."""
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                sock = socket.socket(fileno=os.dup(fd))
                if sock.family in (socket.AF_INET, socket.AF_INET6) and not self._serves(sock):
                    return sock
                sock.close()
        return None

    def _serves(self, sock: socket.socket) -> bool:
        """Whether it listens, or leads to the store."""
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return True
        return self._store in (sock.getsockname()[1], sock.getpeername()[1])

    def _slow_store(self) -> None:
        limited, late_s = StoreBoard._limited, self.fault.delay_s * self._timeout_s

        def late(board: StoreBoard, call: Callable[[], Any]) -> Any:
            time.sleep(late_s)
            return limited(board, call)

        StoreBoard._limited = late

    def _store_away(self) -> None:
        def gone(board: StoreBoard, call: Callable[[], Any]) -> Any:
            raise BoardGoneError("the store of the process group does not answer")

        StoreBoard._limited = gone

    def _cut(self) -> None:
        subprocess.run(["ip", "link", "set", "link0", "down"], check=True)


class _Changed:
    def __init__(self, work: Any, change: Callable[[Tensor], None], sender: int) -> None:
        self._work, self._change, self._sender = work, change, sender

    def advance(self) -> None:
        self._work.advance()

    def wait(self) -> Any:
        found = self._work.wait()
        self._change(found[self._sender] if isinstance(found, list) else found)
        return found


class HarnessComm(TorchComm):
    """Says where a step is, changes what arrives, and stops in the middle of a vote."""

    injector: Injector

    def all_reduce(self, t: Tensor) -> Any:
        self.injector.message()
        return self._perhaps_changed("payload", super().all_reduce(t))

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> Any:
        self.injector.message()
        vote = t.dtype == torch.int64 and len(t) == WORDS
        kind = "vote" if vote else "header" if t.dtype == torch.int64 else "payload"
        if kind == "header":
            self.injector.heads()
        return self._perhaps_changed(kind, super().all_gather(t, sizes, lane))

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Any:
        self.injector.message()
        return self._perhaps_changed("payload", super().all_to_all(parts, sizes))

    def _perhaps_changed(self, kind: str, work: Any) -> Any:
        if not self.injector.corrupts(kind):
            return work
        return _Changed(work, self._flip, (self.rank + 1) % 2)

    def _flip(self, part: Tensor) -> None:
        """One bit, anywhere."""
        self.injector.note()
        place = self.injector.fault.place * part.nbytes
        part.view(-1).view(torch.uint8)[int(place)] ^= 1 << int(8 * place) % 8

    def _started(self, call: str, t: Tensor, other: int, tag: int) -> Any:
        if call == SEND and tag == tag_of(self._turn, VOTE_LANE):
            self._vote(call, t, tag)
        return super()._started(call, t, other, tag)

    def _vote(self, call: str, t: Tensor, tag: int) -> None:
        """All receives are posted, and no vote is sent yet."""
        injector = self.injector
        if not injector.armed or injector.fault.moment != "voting":
            return
        if injector.fault.kind in ("kill", "restart", "reset"):
            for other in injector.fault.heard_by:
                with suppress(ExchangeError):
                    super()._started(call, t, other, tag).wait()
        injector.at("voting")


def run(
    trial: Trial, rank: int, folder: Path, address: str, listening: int | None, tell: Tell
) -> None:
    """Trains until all steps are applied, or a site is lost.

    Args:
        trial: what happens.
        rank: this site.
        folder: of stores that are files.
        address: of stores that are not.
        listening: the file descriptor that site 0 is to listen at, if it is not to open one.
        tell: writes a line.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
    fault = trial.fault
    HarnessComm.injector = injector = Injector(trial, rank, address, tell)
    outergrad.comm.process_group.TorchComm = HarnessComm
    store = _store(trial, rank, folder, address, listening)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.sites)
    odd = fault.kind == "settings" and injector.mine
    models = [build(trial.model, 24 + 2 * k) for k in range(trial.sessions)]
    model = models[0] = build(trial.model, 20) if odd and fault.moment == "width" else models[0]
    if odd and fault.moment == "dtype":
        model.double()
    if odd and fault.moment == "parameter":
        model.register_parameter("more", nn.Parameter(torch.zeros(3)))
    method = METHODS[trial.method]
    method = og.DAD(bucket_bytes=12345) if odd and fault.moment == "method" else method
    if odd:
        injector.note()
        if fault.moment == "crash":
            sys.exit(0)
    CommitParticipant.ask_again = _told(CommitParticipant.ask_again, tell)
    Digests.look = _after(lambda: injector.at("settling"), Digests.look)
    try:
        _train(trial, rank, models, method, injector, tell)
    except og.DriftError as error:
        tell("drifted", why=str(error))
    except og.SiteLostError as error:
        _tell_of(error, trial, models, tell)
        raise


def _after(first: Callable[[], None], look: Callable[..., Any]) -> Any:
    """Something happens before the loop reads what the others have received."""

    def looks(*about: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            first()
        return look(*about)

    return looks


def _told(ask_again: Callable[..., bytes], tell: Tell) -> Any:
    """Tells that a message has to come once more."""

    def asks(*about: Any) -> bytes:
        tell("asked")
        return ask_again(*about)

    return asks


def _tell_of(
    error: og.SiteLostError, trial: Trial, models: Sequence[nn.Module], tell: Tell
) -> None:
    """With gradients that are left; of two models the other one has its last step's."""
    counts = [sum(p.grad is not None for p in model.parameters()) for model in models]
    known = {"certain": error.certain, "may_differ": error.may_differ}
    about = {"sites": error.sites, "step": error.step, "why": str(error)}
    tell("lost", **about, **known, grads=min(counts) > 0)


def _train(
    trial: Trial,
    rank: int,
    models: list[nn.Sequential],
    method: Any,
    injector: Injector,
    tell: Tell,
) -> None:
    options = {
        "timeout": trial.timeout_s,
        "max_bad_steps": 1 if trial.fault.kind == "nan" else None,
    }
    sessions = [og.distribute(model, method, **options) for model in models]
    tell("ready")
    Site(trial, rank, models, sessions, injector, tell).train()
    injector.begin(trial.steps)
    saves = trial.fault.kind == "corrupt" and not on_transport(dist.group.WORLD).lost
    for session in sessions:  # whose last steps nobody has voted on
        if trial.detaches:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                session.detach()
            for one in caught:
                tell("warned", why=str(one.message))
        elif saves:
            session.state_dict()
    if trial.drops:
        del session
        sessions.clear()
        models.clear()
        gc.collect()


def come_again(
    trial: Trial, rank: int, folder: Path, address: str, listening: None, tell: Tell
) -> None:
    """A site that starts alone, while the others go on or have ended."""
    torch.set_num_threads(1)
    store = _store(trial, rank, folder, address, None, newcomer=True)
    options = {"world_size": trial.sites, "timeout": timedelta(seconds=NEWCOMER_S)}
    dist.init_process_group("gloo", store=store, rank=rank, **options)
    tell("joined")
    og.distribute(build(trial.model), METHODS[trial.method], timeout=trial.timeout_s)


def _store(
    trial: Trial,
    rank: int,
    folder: Path,
    address: str,
    listening: int | None,
    *,
    newcomer: bool = False,
) -> dist.Store:
    limit = timedelta(seconds=NEWCOMER_S if newcomer else 60.0)
    if trial.store == "file":
        store = dist.FileStore(str(folder / f"store{trial.number}"), trial.sites)
        store.set_timeout(limit)
        return store
    host, port = address.rsplit(":", 1)
    serves = rank == 0 and not (newcomer and trial.fault.kind == "twin")
    options = {"wait_for_workers": False, "master_listen_fd": listening}
    return dist.TCPStore(host, int(port), None, serves, limit, **options)


class Site:
    """The loop of a user, who goes on after a step that was discarded."""

    def __init__(
        self,
        trial: Trial,
        rank: int,
        models: Sequence[nn.Sequential],
        sessions: Sequence[og.Session],
        injector: Injector,
        tell: Tell,
    ) -> None:
        self._trial, self._rank, self._models, self._sessions = trial, rank, models, sessions
        self._injector, self._tell = injector, tell
        self._optimizers = [Adam(model.parameters(), lr=0.01) for model in models]
        self._outer = trial.method == "local steps"

    def train(self) -> None:
        """Tells of every step that counts what has come of it."""
        applied = 0
        self._tell("applied", step=0, **self._state())
        while applied < self._trial.steps:
            self._injector.begin(applied)
            try:
                counts = self._step(applied)
            except (og.StepDiscardedError, InjectedError) as error:
                self._tell("discarded", why=str(error), error=type(error).__name__)
                continue
            if counts:
                self._tell("applied", step=applied + 1, **self._state())
                self._injector.evaluate(applied)
                applied += 1
        if on_transport(dist.group.WORLD).lost:  # in the last step, which counts all the same
            self._tell("noted")
        self._tell("done")

    def _step(self, applied: int) -> bool:
        """Whether it counts; models take turns."""
        injector, turn = self._injector, applied % len(self._models)
        model, optimizer = self._models[turn], self._optimizers[turn]
        optimizer.zero_grad()
        factor, injector.is_bad = math.nan if injector.is_bad else 1.0, False
        h = model[0](batch(self._trial.model, self._rank, applied))
        h.register_hook(lambda grad: injector.at("backward"))
        loss = (model[1](h) ** 2).mean() * factor
        loss.register_hook(lambda grad: injector.at("loss"))
        loss.backward()
        if not self._outer and all(p.grad is None for p in model.parameters()):
            self._tell("skipped")
            return False
        injector.at("optimizer")
        optimizer.step()
        return not self._outer or not self._sessions[turn]._updates.outer.counter.any_made

    def _state(self) -> dict[str, Any]:
        """Of all that must be the same on all sites: a digest, and a number that rounds little."""
        found, squares = hashlib.sha256(), 0.0
        for params, optimizer in self._shared():
            found.update(_digest(params, optimizer))
            squares += sum(p.detach().double().square().sum().item() for p in params)
        return {"state": found.hexdigest()[:16], "mark": math.sqrt(squares)}

    def _shared(self) -> list[tuple[list[Tensor], torch.optim.Optimizer]]:
        if self._outer:
            outer = [one._updates.outer for one in self._sessions]
            return [(list(one.start.values()), one.optimizer) for one in outer]
        pairs = zip(self._models, self._optimizers, strict=True)
        return [(list(model.parameters()), optimizer) for model, optimizer in pairs]


def _digest(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> bytes:
    states = [optimizer.state.get(p, {}) for p in params]
    kept = [s[name] for s in states for name in sorted(s) if isinstance(s[name], Tensor)]
    found = hashlib.sha256()
    for t in [*params, *kept]:
        found.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()
