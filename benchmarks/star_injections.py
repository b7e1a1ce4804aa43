"""Faults at random in a training of sites around a hub that go on without those that are lost.

Sites are processes of this machine. Each trains, and writes a line for every step: who took part,
and a digest of its parameters. Once in a while one of them is killed, killed and started again at
once, stopped for a moment or for long, or its connections are shut. Who is lost is started again
and comes back. In the end `judged` reads what all have written, and the hub's log.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import outergrad as og
from outergrad.star.folder import HubFolder
from outergrad.star.journal import verified
from outergrad.star.server import HubServer

SITES, GRACE_S, TIMEOUT_S = 4, 0.8, 15.0
FAULTS = ("cut", "brief stop", "long stop", "kill", "restart")
_DEADLY = {"long stop", "kill", "restart"}
_STEP_S, _HANGS_S, _LONG_S, _BRIEF_S = 0.01, 120.0, 7.0, 0.4
METHODS = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "edad": og.EDAD(always=True),
    "rank-dad": og.RankDAD(rank=2, min_ratio=1),
    "few-bits": og.RankDAD(rank=2, min_ratio=1, wire=og.wire.Int4()),
    "two-way": og.RankDAD(rank=2, min_ratio=1, reduce="two_way"),
    "power-sgd": og.PowerSGD(rank=2, min_ratio=1),
}


@dataclass
class Injected:
    """One fault.

    Attributes:
        fault: which.
        site: whose.
        at: when, by the clock of all processes.
        still_s: the longest that no site made a step, from the second behind it on.
    """

    fault: str
    site: str
    at: float
    still_s: float = 0.0


@dataclass
class _Site:
    """A site, and the processes that it had."""

    name: str
    process: BaseProcess | None = None
    count: int = 0
    files: list[Path] = field(default_factory=list)


# -- a site ----------------------------------------------------------------------------------------


def run_site(folder: Path, name: str, file: Path, method: str) -> None:
    """Trains until `stop` says at which step it is over."""
    signal.signal(signal.SIGUSR1, lambda *_: shut_connections())
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))
    transport = og.Star(kit=folder / f"{name}.kit", when_lost="go on", wait_s=60)
    with file.open("w", buffering=1) as lines:

        def tell(what: str, **about: Any) -> None:
            lines.write(json.dumps({"what": what, "time": time.time(), **about}) + "\n")

        try:
            session = og.distribute(
                model,
                METHODS[method],
                transport=transport,
                timeout=TIMEOUT_S,
                recorder=_Told(tell),
            )
            _train(model, session, folder / "stop", name, tell)
            session.detach()
            tell("done")
        except Exception as error:
            tell("raised", error=type(error).__name__, told=str(error)[:300])


def _train(model: nn.Module, session: og.Session, stop: Path, name: str, tell: Any) -> None:
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    tell("begins", step=session.stats().step)
    while not stop.exists() or session.stats().step < int(stop.read_text() or 1 << 30):
        step = session.stats().step
        optimizer.zero_grad()
        seed = torch.Generator().manual_seed(100 * step + sum(map(ord, name)))
        x = torch.randn(8, 20, generator=seed)
        time.sleep(_STEP_S)
        try:
            (model(x) ** 2).mean().backward()
        except og.SitesChangedError as error:
            tell("void", step=step, lost=error.lost, sites=error.sites, epoch=error.epoch)
            continue
        optimizer.step()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        tell("made", step=step, digest=digest.hexdigest()[:16])


class _Told:
    """A recorder of who took part."""

    def __init__(self, tell: Any) -> None:
        self._tell = tell

    def record(self, event: og.events.Event) -> None:
        """Steps and changes alone."""
        if isinstance(event, og.events.Step):
            self._tell("part", step=event.step, sites=event.took_part)
        elif isinstance(event, og.events.Change):
            self._tell("change", step=event.step, sites=event.sites, epoch=event.epoch)


def shut_connections() -> None:
    """Of this process, by TCP."""
    import socket

    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is no connection


# -- the trial -------------------------------------------------------------------------------------


def inject(count: int, seed: int, method: str) -> bool:
    """Prints a table, and what went wrong; returns whether nothing did."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        trial = _Trial(folder, random.Random(seed), method)
        wrong = trial.run(count)
        wrong += judged(folder, trial)
    print(f"{method}: {len(trial.injected)} faults, {trial.steps} steps, {trial.seconds:.0f} s")
    print(
        "| fault | injected | longest time without a step, s: median | longest |",
        "|---|---|---|---|",
        sep="\n",
    )
    for fault in FAULTS:
        still = [one.still_s for one in trial.injected if one.fault == fault]
        if still:
            print(f"| {fault} | {len(still)} | {statistics.median(still):.2f} | {max(still):.2f} |")
    print(f"{trial.void} steps void, {trial.lost} sites lost, {trial.back} taken in again")
    print(*wrong or ["nothing went wrong"], sep="\n")
    return not wrong


class _Trial:
    """A hub, and sites that have faults."""

    def __init__(self, folder: Path, chance: random.Random, method: str) -> None:
        self.folder, self._chance, self._method = folder, chance, method
        hub = HubFolder(folder / "hub")
        hub.create("localhost:1")
        self.sites = [_Site(f"site-{letter}") for letter in "abcdefgh"[:SITES]]
        self.server: HubServer | None = None
        self.injected: list[Injected] = []
        self.steps = self.void = self.lost = self.back = 0
        self.seconds = 0.0

    def run(self, count: int) -> list[str]:
        """Injects so many; returns what hung."""
        hub, began = HubFolder(self.folder / "hub"), time.monotonic()
        kits = {site.name: hub.invite(site.name) for site in self.sites}
        server = HubServer(hub, "127.0.0.1:0", [site.name for site in self.sites], GRACE_S)
        server.start()
        for name, kit in kits.items():
            kit = type(kit)(**{**vars(kit), "hub": f"localhost:{server.port}"})
            kit.write(self.folder / f"{name}.kit")
        try:
            for site in self.sites:
                self._start(site)
            wrong = self._wait_for_all()
            while not wrong and len(self.injected) < count:
                wrong = self._one()
            return wrong or self._stop()
        finally:
            for site in self.sites:
                if site.process is not None:
                    site.process.kill()
                    site.process.join()
            server.stop()
            self.seconds = time.monotonic() - began

    def _one(self) -> list[str]:
        """One fault, or two at a time; then all are there again."""
        time.sleep(self._chance.uniform(0.05, 0.6))
        deaths = 0
        for site in self._chance.sample(self.sites, self._chance.choice((1, 1, 1, 2))):
            fault = self._chance.choice(FAULTS)
            deaths += fault in _DEADLY
            self._have(site, fault)
            time.sleep(self._chance.choice((0.0, 0.1, 0.5)))
        time.sleep(self._chance.uniform(0.0, 2.0))
        for site in self.sites:
            if site.process is None or not site.process.is_alive():
                self._start(site)
        return self._wait_for_all()

    def _have(self, site: _Site, fault: str) -> None:
        assert site.process is not None
        pid = site.process.pid
        self.injected.append(Injected(fault, site.name, time.time()))
        if fault == "cut":
            os.kill(pid, signal.SIGUSR1)
        elif fault in ("brief stop", "long stop"):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_BRIEF_S if fault == "brief stop" else _LONG_S)
            os.kill(pid, signal.SIGCONT)
            if fault == "long stop":
                site.process.join(TIMEOUT_S + 5)
        else:
            os.kill(pid, signal.SIGKILL)
            site.process.join()
            if fault == "restart":
                self._start(site)

    def _start(self, site: _Site) -> None:
        file = self.folder / f"{site.name}.{site.count}.jsonl"
        site.count += 1
        site.files.append(file)
        work = partial(run_site, self.folder, site.name, file, self._method)
        site.process = multiprocessing.get_context("spawn").Process(target=work, daemon=True)
        site.process.start()

    def _wait_for_all(self) -> list[str]:
        """Until each site makes steps that all take part in."""
        since, until = time.time(), time.monotonic() + _HANGS_S
        while time.monotonic() < until:
            last = [_last_part(site.files[-1]) for site in self.sites]
            if all(one and one["time"] > since and len(one["sites"]) == SITES for one in last):
                return []
            for site in self.sites:
                if site.process is not None and not site.process.is_alive():
                    self._start(site)  # it was lost while it came back
            time.sleep(0.05)
        return [f"after {self.injected[-1:]}: not all take part again within {_HANGS_S:g} s"]

    def _stop(self) -> list[str]:
        steps = [(_last_part(site.files[-1]) or {}).get("step", 0) for site in self.sites]
        part = self.folder / "stop.part"
        part.write_text(str(max(steps) + 150))
        part.rename(self.folder / "stop")
        for site in self.sites:
            assert site.process is not None
            site.process.join(_HANGS_S)
        return [f"{s.name} does not end" for s in self.sites if s.process and s.process.is_alive()]


def _last_part(file: Path) -> dict[str, Any] | None:
    return next((one for one in reversed(list(lines_of(file))) if one["what"] == "part"), None)


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """What a process has written; the last line may be half."""
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            return


# -- what came of it -------------------------------------------------------------------------------


def judged(folder: Path, trial: _Trial) -> list[str]:
    """What went wrong, one line each."""
    found = {f: list(lines_of(f)) for site in trial.sites for f in site.files}
    hub = HubFolder(folder / "hub")
    log = list(verified(hub.log_file, hub.certificate_file.read_text()))
    wrong, digests, parts = [], defaultdict(set), defaultdict(set)
    for lines in map(_known_to_others, found.values()):
        for one in lines:
            if one["what"] == "made":
                digests[one["step"]].add(one["digest"])
            elif one["what"] == "part":
                parts[one["step"]].add(tuple(one["sites"]))
    trial.steps = len(digests)
    wrong += [f"step {k}: replicas differ" for k, some in digests.items() if len(some) > 1]
    wrong += [f"step {k}: {some} took part?" for k, some in parts.items() if len(some) > 1]
    wrong += _not_logged(log, parts)
    wrong += _not_in_step(found, trial)
    deaths = sum(one.fault in _DEADLY for one in trial.injected)
    voids = {
        (v["epoch"], tuple(v["sites"]))
        for some in found.values()
        for v in some
        if v["what"] == "void"
    }
    trial.void, trial.lost = len(voids), sum(one["what"] == "lost" for one in log)
    trial.back = sum(len(one["back"]) for one in log if one["what"] == "epoch")
    if trial.void > trial.lost:
        wrong.append(f"{trial.void} steps were void, where {trial.lost} sites were lost")
    if trial.lost > deaths + _lost_while_coming(found):
        wrong.append(f"{trial.lost} sites were lost, where {deaths} died")
    times = sorted(one["time"] for some in found.values() for one in some if one["what"] == "made")
    until = [one.at for one in trial.injected[1:]] + times[-1:]
    for one, end in zip(trial.injected, until, strict=True):
        gaps = [(now, then) for now, then in pairwise(times) if one.at - 0.1 < now < one.at + 1.0]
        one.still_s = max((then - now for now, then in gaps if now < end), default=0.0)
    return wrong


def _known_to_others(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the last step of a process that was lost: it may have it alone."""
    if any(one["what"] == "done" for one in lines):
        return lines
    last = max((one.get("step", -1) for one in lines), default=-1)
    return [one for one in lines if one.get("step") != last]


def _not_logged(log: list[dict[str, Any]], parts: dict[int, set[tuple[str, ...]]]) -> list[str]:
    """Steps of which the hub's log says something else than the sites, or nothing."""
    logged = defaultdict(set)
    for one in log:
        if one["what"] == "step":
            for step in range(one["first"], one["step"] + 1):
                logged[step].add(tuple(sorted(one["sites"])))
    told = {step: {tuple(sorted(sites)) for sites in some} for step, some in parts.items()}
    return [
        f"step {k}: the log has {sorted(logged[k])}, the sites {sorted(some)}"
        for k, some in told.items()
        if logged[k] != some
    ]


def _not_in_step(found: dict[Path, list[dict[str, Any]]], trial: _Trial) -> list[str]:
    """Processes that ended by another error than that they were lost."""
    known = {"SiteLostError", "RuntimeError"}
    return [
        f"{file.name}: {one['error']}: {one['told']}"
        for file, lines in found.items()
        for one in lines
        if one["what"] == "raised" and one["error"] not in known
    ]


def _lost_while_coming(found: dict[Path, list[dict[str, Any]]]) -> int:
    """Processes that raised: some were coming when others were lost."""
    return sum(one["what"] == "raised" for lines in found.values() for one in lines)
