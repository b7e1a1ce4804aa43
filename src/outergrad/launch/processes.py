"""Runs several functions at once, each in its own process, and leaves no process behind."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from outergrad.launch.errors import RecipeError, SiteError
from outergrad.launch.interrupts import raise_in

T = TypeVar("T")

GRACE_S = 2.0
_ENDING = [number for number in signal.Signals if number.name in ("SIGTERM", "SIGHUP")]


@dataclass(frozen=True)
class Failure:
    """Failure of a process.

    Attributes:
        at_s: Time of the failure in seconds, on the monotonic clock that all processes share.
        error: Exception to raise.
        code: Exit code if the process ended without a report; negative if a signal ended it.
    """

    at_s: float
    error: RecipeError | SiteError
    code: int | None = None


@dataclass(frozen=True)
class Child:
    """A process, and the pipe through which it reports its outcome.

    The pipe can be read when the process is done or has ended.
    """

    site: int
    process: BaseProcess
    pipe: Connection

    def outcome(self) -> Any:
        """Waits for the process to be done or to end; returns its result or its `Failure`."""
        try:
            outcome = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            error = SiteError(f"site {self.site} {_end_of(self.process)}")
            return Failure(0.0, error, self.process.exitcode)
        self.process.join(GRACE_S)  # it may still be writing its last lines
        return outcome


def run_processes(
    works: Sequence[Callable[[], T]],
    *,
    verbose: bool = False,
    numbers: Sequence[int] | None = None,
) -> list[T]:
    """Runs each function in a process of its own.

    Args:
        works: Picklable functions whose results can be pickled.
        verbose: Whether a failure includes its traceback.
        numbers: Numbers of the sites, if not 0, 1 and so on.

    Returns:
        Their results, in order.

    Raises:
        RecipeError: A process raised it.
        SiteError: A process failed otherwise; the first failure in time is raised.
    """
    children: list[Child] = []
    sites = range(len(works)) if numbers is None else numbers
    try:
        with _interrupts_ignored():
            for site, work in zip(sites, works, strict=True):
                children.append(_start(site, work, verbose))
        outcomes = _watch(children)
    finally:
        _end(children)
    failures = {site: o for site, o in outcomes.items() if isinstance(o, Failure)}
    if failures:
        error = min(failures.values(), key=lambda failure: failure.at_s).error
        if isinstance(error, SiteError):
            error.lost = lost_of(failures)
        raise error
    return [outcomes[site] for site in sites]


def lost_of(failures: Mapping[int, Failure]) -> frozenset[int]:
    """Returns the sites whose processes ended without a report.

    Sites that ended by SIGABRT count only if no site ended otherwise: gloo may abort a healthy
    process because another one is gone.
    """
    silent = {site: failure.code for site, failure in failures.items() if failure.code is not None}
    killed = {site for site, code in silent.items() if code != -signal.SIGABRT}
    return frozenset(killed or silent)


def error_text(error: BaseException, verbose: bool) -> str:
    """Formats an error as one line, or with its traceback if verbose."""
    if verbose:
        return "".join(traceback.format_exception(error)).rstrip()
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP, which would end this process at once, into an ordinary exit.

    They raise SystemExit with 128 plus the signal's number, so that open resources are closed.
    """
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda n, frame: raise_in(frame, n, SystemExit(128 + n)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Starts processes inside the block that ignore Ctrl-C: this process ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start(site: int, work: Callable[[], object], verbose: bool) -> Child:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child_main, args=(sender, site, work, verbose), daemon=True)
    process.start()
    sender.close()
    return Child(site, process, receiver)


def _child_main(pipe: Connection, site: int, work: Callable[[], object], verbose: bool) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    outcome = _attempt(site, work, verbose)
    pipe.send(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own shutdown may hang or abort on threads that Gloo still has.
    os._exit(1 if isinstance(outcome, Failure) else 0)


def _attempt(site: int, work: Callable[[], T], verbose: bool) -> T | Failure:
    try:
        return work()
    except RecipeError as error:
        return Failure(time.monotonic(), error)
    except Exception as error:
        return Failure(time.monotonic(), SiteError(f"site {site}: {error_text(error, verbose)}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _watch(children: list[Child]) -> dict[int, Any]:
    """Waits until all are done, or one has failed and the others had time to notice it."""
    running = {child.pipe: child for child in children}
    outcomes: dict[int, Any] = {}
    failed = False
    while running and (ready := wait(list(running), GRACE_S if failed else None)):
        done = [running.pop(pipe) for pipe in ready if isinstance(pipe, Connection)]
        outcomes |= {child.site: child.outcome() for child in done}
        failed = any(isinstance(outcome, Failure) for outcome in outcomes.values())
    return outcomes


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _end(children: list[Child]) -> None:
    """Ends the processes that still run: first by SIGTERM, then by SIGKILL."""
    for stop in (BaseProcess.terminate, BaseProcess.kill):
        for child in children:
            stop(child.process)
        for child in children:
            child.process.join(GRACE_S)
    for child in children:
        child.pipe.close()
