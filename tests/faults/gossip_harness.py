"""The fault harness of gossip: sites as processes, one of which dies, is late, cut off or lies.

python tests/faults/gossip_harness.py --injections 300 --seed 1
python tests/faults/gossip_harness.py --seed 1 --only 17
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch._dynamo  # noqa: F401  (what the first step of an optimizer imports)
from gossip_judge import GossipVerdict, judge_gossip, summary
from gossip_site import run_site
from gossip_trials import WAYS, GossipTrial, draw
from harness import Process
from judge import Seen

import outergrad.star.dial
import outergrad.star.lines  # noqa: F401  (what a site needs, and would take time to import)
from outergrad.star.folder import HubFolder
from outergrad.star.server import HubServer

LIMIT_S = 120.0
"""After which a trial that is not over has failed, and its processes are ended."""
_GRACE_S = 2.0
"""Of hubs: a busy machine lets a process wait for a second."""


class RunningGossip:
    """A trial under way.

    Args:
        trial: it.
        folder: for what its sites write.
    """

    def __init__(self, trial: GossipTrial, folder: Path) -> None:
        self.trial, self._folder, self._began = trial, folder, time.monotonic()
        self.hub: Process | None = None
        self.sites: list[Process] = []
        self.hung = self._has_signalled = False
        if trial.way == "gloo":
            self._begin("")
        else:
            self.hub = self._process("hub", _hub(trial, folder))

    def _process(self, name: str, body: Callable[..., None]) -> Process:
        return Process(body, self._folder / f"{self.trial.number}-{name}.txt", ends=False)

    def _begin(self, address: str) -> None:
        for rank in range(self.trial.sites):
            about = self.trial, rank, self._folder, address
            self.sites.append(self._process(str(rank), lambda tell, a=about: run_site(*a, tell)))

    def go_on(self) -> bool:
        """Reads what was told, sends the signals that are due; returns whether it is over."""
        every = [*self.sites, *([self.hub] if self.hub else [])]
        pipes = {process.pipe: process for process in every if process.pipe >= 0}
        for pipe in select.select(list(pipes), [], [], 0.01)[0]:
            pipes[pipe].read()
        for process in every:
            process.reap()
        if self.hub is not None and not self.sites and (told := self.hub.seen.last("listens")):
            self._begin(f"127.0.0.1:{told['port']}")
        if self.sites:
            self._signal(self.sites[self.trial.victim])
            if all(p.seen.status is not None or p.seen.told("over") for p in self.sites):
                (self._folder / f"{self.trial.number}-over").touch()
        if time.monotonic() - self._began > LIMIT_S and not self.hung:
            self.hung = True
            for process in self.sites:
                process.signal(signal.SIGKILL)
        is_over = self.hung or bool(self.sites)
        return is_over and all(process.over for process in self.sites)

    def _signal(self, victim: Process) -> None:
        """Kills, stops or wakes the victim, where that is not its own doing."""
        injected, trial = victim.seen.last("injected"), self.trial
        if injected is None or victim.seen.status is not None:
            return
        if trial.moment == "any" and not self._has_signalled:
            self._has_signalled = True
            victim.signal(signal.SIGKILL if trial.kind == "kill" else signal.SIGSTOP)
        is_due = time.monotonic() - injected["at"] > trial.pause_s
        if trial.kind == "stop" and is_due and victim.seen.resumed_at is None:
            victim.seen.resumed_at = time.monotonic()
            victim.signal(signal.SIGCONT)

    def end(self) -> list[Seen]:
        """Ends the hub; returns what the sites have told."""
        if self.hub is not None:
            self.hub.signal(signal.SIGKILL)
            while not self.hub.over:
                self.hub.reap()
                if self.hub.pipe >= 0:
                    self.hub.read()
        return [process.seen for process in self.sites]


def _hub(trial: GossipTrial, folder: Path) -> Callable[..., None]:
    def body(tell: Callable[..., None]) -> None:
        made, names = HubFolder(folder / f"{trial.number}-hub"), range(trial.sites)
        made.create("localhost:1", ["127.0.0.1"])
        for rank in names:
            made.invite(f"site-{rank}").write(made.path / f"site-{rank}.kit")
        server = HubServer(made, "127.0.0.1:0", [f"site-{rank}" for rank in names], _GRACE_S)
        server.start()
        tell("listens", port=server.port)
        server.wait()

    return body


def run_trials(trials: Sequence[GossipTrial], folder: Path, at_once: int) -> list[GossipVerdict]:
    """Runs trials, some side by side, and judges each."""
    left, running, verdicts = list(trials), list[RunningGossip](), list[GossipVerdict]()
    while left or running:
        while left and len(running) < at_once:
            running.append(RunningGossip(left.pop(0), folder))
        for one in [one for one in running if one.go_on()]:
            running.remove(one)
            verdict = judge_gossip(one.trial, folder, one.end(), hung=one.hung)
            verdicts.append(verdict)
            if verdict.complaints:
                _show(one, folder, verdict)
            for path in folder.glob(f"{one.trial.number}-*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return verdicts


def _show(one: RunningGossip, folder: Path, verdict: GossipVerdict) -> None:
    print(f"\ntrial {one.trial.number}: {one.trial}", flush=True)
    print(*(f"  - {complaint}" for complaint in verdict.complaints), sep="\n", flush=True)
    for rank, process in enumerate(one.sites):
        for line in process.seen.lines[-4:]:
            print(f"    {rank}: {line}", flush=True)
        printed = folder / f"{one.trial.number}-{rank}.txt"
        text = printed.read_text()[-2000:] if printed.exists() else ""
        print(*(f"    {rank} | {line}" for line in text.splitlines()), sep="\n", flush=True)


def main() -> int:
    """The command; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--injections", type=int, default=20, help="faults that come to pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="a single trial, by its number")
    parser.add_argument("--way", choices=sorted(set(WAYS)), help="only over this one")
    parser.add_argument("--at-once", type=int, default=3, help="trials side by side")
    options = parser.parse_args()
    ways = (options.way,) if options.way else WAYS
    parent, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="outergrad-gossip-faults-"))
    verdicts, number, began = list[GossipVerdict](), 0, time.monotonic()
    gc.freeze()  # a child would copy every page that the collector writes to
    try:
        while (missing := options.injections - sum(v.injected for v in verdicts)) > 0:
            numbers = range(number, number + missing)
            numbers = [options.only] if options.only is not None else numbers
            trials = [draw(n, options.seed, ways) for n in numbers]
            verdicts += run_trials(trials, folder, options.at_once)
            number += missing
            if options.only is not None:
                break
    finally:
        if os.getpid() == parent:  # what was forked comes this way, too
            shutil.rmtree(folder, ignore_errors=True)
    print(*summary(verdicts), sep="\n")
    print(f"seed {options.seed}, {time.monotonic() - began:.0f} s")
    return int(any(verdict.complaints for verdict in verdicts))


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
