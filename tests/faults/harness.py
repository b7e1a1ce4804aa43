"""The fault harness: sites in processes of their own, one of which dies, hangs, lies or is cut off.

Run it longer than the tests do, or one trial again:

    python tests/faults/harness.py --injections 1000 --seed 7
    python tests/faults/harness.py --seed 7 --only 123
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch._dynamo  # noqa: F401  (what the first step of an optimizer imports)
import torch.distributed as dist
from faulty_site import come_again, run
from judge import Seen, Verdict, judge, summary
from trials import Trial, draw

from outergrad.launch.links import Place, ShapedLink, what_is_missing
from outergrad.launch.namespaces import INTERFACE

AT_ONCE = 4
"""Trials that run side by side: most of their time they wait."""
LONGEST_S = 10.0
"""A timeout that sites keep on the busiest machine, unless one waits for what never comes."""
LIMIT_S = 120.0
"""After which a trial that is not over has failed, and its processes are ended."""
MOST_SITES = 4
_CAN_CUT = what_is_missing(ShapedLink(rate_bit_per_s=None), MOST_SITES) is None
_PORTS = iter(range(20000, 30000))
"""Of the stores in namespaces, where nobody else listens."""

# In a process of its own: what is forked here would take the namespaces down when it ends.
_KEEPER = """
import sys
from outergrad.launch.links import ShapedLink, places
with places(int(sys.argv[1]), ShapedLink(rate_bit_per_s=None)) as found:
    print(*[place.namespace for place in found], flush=True)
    sys.stdin.read()
"""


class Process:
    """A site of a trial: forked, so that it has PyTorch from the start.

    Args:
        body: what it does; is given what writes a line for the harness.
        errors: a file for what it prints.
        ends: whether Python takes all of it apart in the end, as of a user's program, which costs
            a hundred times what the trial does.
    """

    def __init__(self, body: Callable[..., None], errors: Path, *, ends: bool) -> None:
        self.seen, self._text = Seen(), ""
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be(body, write, errors, ends=ends)
        os.close(write)

    def read(self) -> None:
        """Takes in what it has told since."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self._text = (self._text + data.decode()).split("\n")
        self.seen.lines += [json.loads(line) for line in lines]
        if not data:
            os.close(self.pipe)
            self.pipe = -1

    def reap(self) -> None:
        """Notes how it ended, if it has."""
        if self.seen.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.seen.status = os.waitstatus_to_exitcode(status)

    def signal(self, number: int) -> None:
        """Sends a signal, if it still lives."""
        if self.seen.status is None:
            os.kill(self.pid, number)

    @property
    def over(self) -> bool:
        """Whether it has ended and nothing is left to read."""
        return self.seen.status is not None and self.pipe < 0


def _be(body: Callable[..., None], write: int, errors: Path, *, ends: bool) -> None:
    """A child's life."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the harness
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)

    def tell(event: str, **about: object) -> None:
        line = {"event": event, "at": time.monotonic(), **about}
        os.write(write, json.dumps(line).encode() + b"\n")

    tell("began")
    error, why = _outcome(body, tell)
    tell("ended", error=error, why=why)
    if ends:  # through all frames, then through Python's own end
        raise KeyboardInterrupt if error == "KeyboardInterrupt" else SystemExit(0)
    os._exit(0)


def _outcome(body: Callable[..., None], tell: Callable[..., None]) -> tuple[str, str]:
    try:
        body(tell)
    except SystemExit:
        return "left", ""
    except BaseException as error:
        traceback.print_exc()
        return type(error).__name__, str(error)
    return "done", ""


@dataclass
class Running:
    """A trial under way."""

    trial: Trial
    folder: Path
    address: str
    places: Sequence[Place | None]
    began: float = field(default_factory=time.monotonic)
    sites: list[Process] = field(default_factory=list)
    newcomer: Process | None = None
    hung: bool = False

    def start(self, listening: socket.socket | None) -> None:
        """Forks the sites."""
        for rank in range(self.trial.sites):
            self.sites.append(self._process(rank, run, listening))
        if listening is not None:
            listening.close()

    def _process(
        self, rank: int, what: Callable[..., None], listening: socket.socket | None
    ) -> Process:
        trial = self.trial

        def body(tell: Callable[..., None]) -> None:
            if listening is not None and rank:
                listening.close()
            if (place := self.places[rank]) is not None:
                place.enter()
            fd = listening.fileno() if listening is not None and rank == 0 else None
            try:
                what(trial, rank, self.folder, self.address, fd, tell)
            finally:
                if trial.destroys and dist.is_initialized():
                    dist.destroy_process_group()

        return Process(body, self.folder / f"{trial.number}-{rank}.txt", ends=trial.ends)

    @property
    def processes(self) -> list[Process]:
        """All that there are."""
        return [*self.sites, *([self.newcomer] if self.newcomer else [])]

    @property
    def over(self) -> bool:
        """Whether all have ended."""
        return all(process.over for process in self.processes)

    def go_on(self) -> None:
        """Looks who has ended, wakes who was stopped, starts newcomers, and ends what hangs."""
        for process in self.processes:
            process.reap()
        victim = self.sites[self.trial.fault.victim]
        if victim.seen.told("injected"):
            self._after(victim)
        if time.monotonic() - self.began > LIMIT_S and not self.hung:
            self.hung = True
            for process in self.processes:
                process.signal(signal.SIGKILL)

    def _after(self, victim: Process) -> None:
        kind, others = self.trial.fault.kind, [p for p in self.sites if p is not victim]
        stopped = kind == "stop" and victim.seen.resumed_at is None
        if stopped and all(p.seen.status is not None for p in others):
            victim.seen.resumed_at = time.monotonic()
            victim.signal(signal.SIGCONT)
        ready = kind == "twin" or (kind == "restart" and victim.seen.status is not None)
        if ready and self.newcomer is None:
            self.newcomer = self._process(self.trial.fault.victim, come_again, None)


class Harness:
    """Runs trials side by side, and judges each by an undisturbed run.

    Args:
        folder: for stores, and what the sites print.
        names: of network namespaces in which links can be cut.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names = folder, names
        self._references: dict[Trial, Seen] = {}
        self._running: list[Running] = []
        self.verdicts: list[Verdict] = []
        self.again = 0

    @property
    def injections(self) -> int:
        """Faults that came to pass."""
        return sum(verdict.injected for verdict in self.verdicts)

    def run(self, trials: Sequence[Trial]) -> None:
        """All of them."""
        missing = {t.reference: None for t in trials if t.reference not in self._references}
        for trial in missing:
            self._add(trial)
        self._finish()
        for trial in trials:
            self._add(trial)
        self._finish()

    def _finish(self) -> None:
        while self._running:
            self._turn()

    def _add(self, trial: Trial) -> None:
        cuts = trial.fault.kind == "cut"
        while len(self._running) >= AT_ONCE or (cuts and self._cutting):
            self._turn()
        self._running.append(self._started(trial))

    @property
    def _cutting(self) -> bool:
        return any(one.trial.fault.kind == "cut" for one in self._running)

    def _started(self, trial: Trial) -> Running:
        folder, listening = self._folder, None
        if trial.fault.kind == "cut":
            for name in self._names:
                up = ["ip", "-n", name, "link", "set", INTERFACE, "up"]
                subprocess.run(up, check=True)
            address = f"10.77.0.1:{next(_PORTS)}"
            places: list[Place | None] = [Place(name, INTERFACE) for name in self._names]
        else:
            listening = socket.create_server(("127.0.0.1", 0))
            address = "{}:{}".format(*listening.getsockname())
            places = [None] * trial.sites
        one = Running(trial, folder, address, places)
        one.start(listening)
        return one

    def _turn(self) -> None:
        """Reads what was told, and takes leave of trials that are over."""
        pipes = {p.pipe: p for one in self._running for p in one.processes if p.pipe >= 0}
        for pipe in select.select(list(pipes), [], [], 0.01)[0]:
            pipes[pipe].read()
        for one in list(self._running):
            one.go_on()
            if one.over:
                self._running.remove(one)
                self._judge(one)

    def _judge(self, one: Running) -> None:
        seen = [process.seen for process in one.sites]
        newcomer = one.newcomer.seen if one.newcomer else None
        verdict = judge(one.trial, seen, newcomer, self._references.get(one.trial.reference))
        if one.hung:
            verdict = _hung(verdict)
        elif verdict.slow and one.trial.timeout_s < LONGEST_S:
            # Is it the machine that is busy, or would they wait for ever? Again, with more time.
            self.again += 1
            self._running.append(self._started(_with_more_time(one.trial)))
            return
        if one.trial == one.trial.reference:
            self._references[one.trial] = seen[0]
        self.verdicts.append(verdict)
        if verdict.complaints:
            self._show(one, verdict)

    def _show(self, one: Running, verdict: Verdict) -> None:
        print(f"\ntrial {one.trial.number}: {one.trial}", flush=True)
        for complaint in verdict.complaints:
            print(f"  - {complaint}", flush=True)
        for rank, process in enumerate(one.processes):
            for line in process.seen.lines[-4:]:
                print(f"    {rank}: {line}", flush=True)
            printed = self._folder / f"{one.trial.number}-{rank}.txt"
            text = printed.read_text()[-2000:] if printed.exists() else ""
            print(*(f"    {rank} | {line}" for line in text.splitlines()), sep="\n", flush=True)


def _hung(verdict: Verdict) -> Verdict:
    complaint = f"a process was left after {LIMIT_S:.0f} s"
    return replace(verdict, outcome="hung", complaints=(*verdict.complaints, complaint))


def _with_more_time(trial: Trial) -> Trial:
    return replace(trial, timeout_s=4 * trial.timeout_s, number=trial.number + 1_000_000)


def main() -> int:
    """The command; 1 if anything went wrong."""
    options = _options()
    parent, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="outergrad-faults-"))
    keeper, names = _namespaces() if _CAN_CUT and not options.no_cuts else (None, [])
    harness = Harness(folder, names)
    began, number = time.monotonic(), 0
    gc.freeze()  # a child would copy every page that the collector writes to
    try:
        while harness.injections < options.injections:
            numbers = range(number, number + options.injections - harness.injections)
            numbers = [options.only] if options.only is not None else numbers
            drawn = [draw(n, options.seed, options.timeout, can_cut=bool(names)) for n in numbers]
            drawn = [t for t in drawn if options.kind in (None, t.fault.kind)]
            harness.run([t for t in drawn if options.moment in (None, t.fault.moment)])
            number += len(drawn)
            if options.only is not None:
                break
    finally:
        if os.getpid() == parent:  # what was forked comes this way, too
            shutil.rmtree(folder, ignore_errors=True)
            if keeper is not None:
                keeper.communicate()
    print(*summary(harness.verdicts), sep="\n")
    if harness.again:
        print(f"{harness.again} were made again with a longer timeout: the machine was busy")
    print(f"seed {options.seed}, {time.monotonic() - began:.0f} s")
    return int(any(verdict.complaints for verdict in harness.verdicts))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--injections", type=int, default=100, help="faults that come to pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="a single trial, by its number")
    parser.add_argument("--kind", help="only faults of one kind")
    parser.add_argument("--moment", help="only faults at one, as settling")
    parser.add_argument("--timeout", type=float, default=1.0, help="of distribute, in seconds")
    parser.add_argument("--no-cuts", action="store_true", help="leave links alone")
    return parser.parse_args()


def _namespaces() -> tuple[subprocess.Popen[str], list[str]]:
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEPER, str(MOST_SITES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    return keeper, keeper.stdout.readline().split()


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
