"""Many sites in one process: a thread per site, over real process groups."""

import gc
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.nn.parallel import DistributedDataParallel

from outergrad.launch.errors import RecipeError, SiteError
from outergrad.launch.processes import error_text
from outergrad.launch.traffic import on_loopback
from outergrad.step.transport_state import TransportState, on_transport

T = TypeVar("T")
V = TypeVar("V")

TIMEOUT = timedelta(minutes=10)
_GRACE_S = 10.0
_TRIGONOMETRY = (torch.tanh, torch.sin, torch.cos)
_EXPONENTIALS = (torch.exp, torch.expm1, torch.log, torch.erf)
_POLL_S = 0.2


class StoppedError(RuntimeError):
    """Raised in a site's thread when the work of all sites should end."""


class Stop(threading.Event):
    """Event that asks the threads of all sites to end: a thread cannot be ended from outside."""

    def checked(self, items: Iterable[V]) -> Iterator[V]:
        """Yields the items, with a check after each."""
        for item in items:
            yield item
            self.check()

    def check(self) -> None:
        """Raises if the work should end. Call it between two steps of a site.

        Raises:
            StoppedError: the user, or another site, wants the work to end.
        """
        if self.is_set():
            raise StoppedError


Work = Callable[[dist.ProcessGroup, Stop], T]


def simulate(work: Work[T], sites: int, timeout: timedelta = TIMEOUT) -> list[T]:
    """Runs work at every site of one process group, each in a thread of this process.

    Messages go through gloo, as between processes: the same mathematics, and the same byte
    counts. Threads share one random stream: work that draws from it is not reproducible.

    Args:
        work: Work of a site; it should check the stop now and then.
        sites: Number of sites.
        timeout: Timeout of a message.

    Returns:
        The results of all sites.

    Raises:
        RecipeError: A site raised it.
        SiteError: A site failed otherwise.
    """
    first_calls()
    share_generator()
    with on_loopback():
        return _Simulation(work, sites, timeout).run()


def first_calls() -> None:
    """Calls MKL's vector functions once: threads that share a first call may get errors of 5e-5."""
    for function in (*_TRIGONOMETRY, *_EXPONENTIALS):
        function(torch.ones(100))


class _Shared:
    """PyTorch's random generator of the host, behind a lock.

    `Generator.get_state` creates an object while it holds the generator's own mutex. That may start
    Python's garbage collector, which releases the GIL while it frees a tensor. If the thread that
    takes the GIL waits for the generator, each waits for the other, and the process hangs.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._unlock()
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._generator, name)
        if not callable(found):
            return found

        def alone(*args: Any) -> Any:
            with self._lock:
                return found(*args)

        return alone


def share_generator() -> None:
    """Lets several threads read and set PyTorch's random state at the same time.

    This covers calls through `torch.random`, as of `torch.utils.checkpoint` or `torch.manual_seed`.
    """
    own = vars(torch.random)["default_generator"]  # its functions look there
    if not isinstance(own, _Shared):
        torch.random.__dict__["default_generator"] = _Shared(own)


def forget_active_ddp() -> None:
    """Clears the mark by which DDP tells the compiler which model is in a forward pass.

    It is one for the process. Each forward pass puts the mark before it back, so passes in several
    threads may leave the model of a site there that has ended, and with it its connections.
    """
    DistributedDataParallel._active_ddp_module = None


class _Simulation(Generic[T]):
    def __init__(self, work: Work[T], sites: int, timeout: timedelta) -> None:
        self._work, self._sites, self._timeout = work, sites, timeout
        self._threads = max(1, torch.get_num_threads() // sites)
        self._store, self._stop = HashStore(), Stop()
        self._errors: list[RecipeError | SiteError] = []
        self._results: dict[int, T] = {}
        # A group whose last holder is DDP's reducer would wait for itself: all live until all
        # threads have ended.
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._sessions: list[TransportState] = []

    def run(self) -> list[T]:
        try:
            return self._run()
        finally:
            for sessions in self._sessions:
                sessions.end_watching()

    def _run(self) -> list[T]:
        threads = [
            threading.Thread(target=self._site, args=(site,), name=f"site {site}", daemon=True)
            for site in range(self._sites)
        ]
        for thread in threads:
            thread.start()
        try:
            self._wait_for(threads)
        except BaseException:
            self._end(threads)
            raise
        if self._errors:
            raise self._errors[0]
        self._groups.clear()
        forget_active_ddp()
        gc.collect()  # sessions and models refer to each other
        return [self._results[site] for site in range(self._sites)]

    def _site(self, site: int) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._groups[site] = gloo_group(self._store, site, self._sites, self._timeout)
            self._sessions.append(on_transport(self._groups[site]))
            self._results[site] = self._work(self._groups[site], self._stop)
        except Exception as error:
            if not isinstance(error, StoppedError):
                self._errors.append(_told(site, error))
            self._leave(site, error)

    def _leave(self, site: int, error: Exception) -> None:
        """Closes the connections of a failed site, so that sites that wait for it notice.

        They close once nothing refers to the process group, as the frames of the traceback do.
        """
        traceback.clear_frames(error.__traceback__)
        if (held := self._groups.get(site)) is None:
            return
        group = weakref.ref(held)
        del held, self._groups[site]
        if group() is not None:  # takes seconds with many objects, so only if needed
            gc.collect()

    def _wait_for(self, threads: Sequence[threading.Thread]) -> None:
        """Waits until all have ended, or one has failed: the others may be waiting for it."""
        for thread in threads:
            while thread.is_alive():
                thread.join(_POLL_S)
                if self._errors:
                    self._end(threads)
                    return

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        self._stop.set()
        end, wait_s = time.monotonic() + _GRACE_S, _POLL_S
        for thread in threads:
            while thread.is_alive() and time.monotonic() < end:
                thread.join(wait_s)
                if thread.is_alive():
                    forget_active_ddp()
                    gc.collect()  # garbage of a failed site keeps its connections open
                    wait_s *= 2


def _told(site: int, error: Exception) -> RecipeError | SiteError:
    if isinstance(error, RecipeError):
        return RecipeError(str(error))
    return SiteError(f"site {site}: {error_text(error, verbose=False)}")


def gloo_group(
    store: Store, rank: int, sites: int, timeout: timedelta = TIMEOUT
) -> dist.ProcessGroup:
    """Creates a gloo process group that belongs to one thread, not to the process."""
    group = dist.ProcessGroup(store, rank, sites)
    kind = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, rank, sites, timeout)
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    return group
