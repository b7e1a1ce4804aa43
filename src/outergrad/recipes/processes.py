"""Runs several functions at once, each in its own process; all end, or none is left."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from outergrad.recipes.errors import RecipeError, SiteError

GRACE_S = 2.0


@dataclass(frozen=True)
class Failure:
    """Why a process failed.

    Attributes:
        at_s: When, on the monotonic clock that all processes share.
        error: What to raise.
    """

    at_s: float
    error: RecipeError | SiteError


@dataclass(frozen=True)
class Child:
    """A process and the pipe through which it tells why it failed.

    The pipe can be read when the process has failed or ended.
    """

    site: int
    process: BaseProcess
    pipe: Connection

    def failure(self) -> Failure | None:
        """Waits for the process to fail or end; tells why it failed, if it did."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
        if self.process.exitcode == 0:
            return None
        return Failure(0.0, SiteError(f"site {self.site} {_end_of(self.process)}"))


def run_processes(works: Sequence[Callable[[], None]], *, verbose: bool = False) -> None:
    """Runs each function in a process of its own.

    Args:
        works: Picklable functions.
        verbose: Whether a failure tells its traceback.

    Raises:
        RecipeError: What a process raised.
        SiteError: A process failed otherwise, the first one in time.
    """
    children: list[Child] = []
    try:
        with _interrupts_ignored():
            for site, work in enumerate(works):
                children.append(_start(site, work, verbose))
        failure = _watch(children)
    finally:
        _end(children)
    if failure:
        raise failure.error


def tell(error: BaseException, verbose: bool) -> str:
    """Writes an error as one line, or with its traceback."""
    if verbose:
        return "".join(traceback.format_exception(error)).rstrip()
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Lets processes be started that ignore Ctrl-C: whoever started them ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start(site: int, work: Callable[[], None], verbose: bool) -> Child:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child_main, args=(sender, site, work, verbose), daemon=True)
    process.start()
    sender.close()
    return Child(site, process, receiver)


def _child_main(pipe: Connection, site: int, work: Callable[[], None], verbose: bool) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    failure = _attempt(site, work, verbose)
    if failure:
        pipe.send(failure)
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own shutdown may hang or abort on threads that Gloo still has.
    os._exit(1 if failure else 0)


def _attempt(site: int, work: Callable[[], None], verbose: bool) -> Failure | None:
    try:
        work()
    except RecipeError as error:
        return Failure(time.monotonic(), error)
    except Exception as error:
        return Failure(time.monotonic(), SiteError(f"site {site}: {tell(error, verbose)}"))
    return None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _watch(children: list[Child]) -> Failure | None:
    """Waits until all have ended, or one has failed and the others had time to notice it."""
    running = {child.pipe: child for child in children}
    failures: list[Failure] = []
    while running and (ready := wait(list(running), GRACE_S if failures else None)):
        ended = [running.pop(pipe).failure() for pipe in ready if isinstance(pipe, Connection)]
        failures += [failure for failure in ended if failure]
    return min(failures, key=lambda failure: failure.at_s, default=None)


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _end(children: list[Child]) -> None:
    """Ends what still runs: first by asking, then by force."""
    for stop in (BaseProcess.terminate, BaseProcess.kill):
        for child in children:
            stop(child.process)
        for child in children:
            child.process.join(GRACE_S)
    for child in children:
        child.pipe.close()
