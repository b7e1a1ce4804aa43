"""Base of a site in any protocol: it computes, sends its messages and receives the others'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outergrad.core.errors import ExchangeError, Failure
from outergrad_lab.checking.network import Network, Store
from outergrad_lab.checking.trial import Trial
from outergrad_lab.checking.world import Process, Waiting, World

MESSAGES = 0
"""Lane of the messages of a step."""
_COMPUTES_S = 0.2
_STILL_S = 0.1


@dataclass
class Ending:
    """Report on how a site ended.

    Attributes:
        applied: number of applied steps.
        done: whether it ended in order.
        lost: sites that its error names; None if it raised none.
        certain: as in `SiteLostError`.
        may_differ: as in `SiteLostError`.
        left: whether its program raised an error of its own.
        compared: whether it knows what all received in the last steps; else it warns of that.
        longest_s: longest seconds in a step, without pauses of the process.
        wrong: actions that must never happen.
        epoch: number of the membership in which it ended.
        ranks: its rank in each membership.
        left_after: number of steps that it had applied when it left each membership for the next.
        history: the steps that it has applied, or was handed over.
    """

    applied: int = 0
    done: bool = False
    lost: tuple[int, ...] | None = None
    certain: bool = True
    may_differ: tuple[int, ...] = ()
    left: bool = False
    compared: bool = True
    longest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    epoch: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    left_after: dict[int, int] = field(default_factory=dict)
    history: tuple[object, ...] = ()

    def __str__(self) -> str:
        steps = f"has applied {self.applied} step{'s' * (self.applied != 1)}"
        if self.lost is None:
            compared = "" if self.compared else ", without having compared"
            return f"{steps} and " + ("is done" if self.done else "is no more") + compared
        said = "certain" if self.certain else "not certain"
        return f"{steps}, lost {list(self.lost)}, {said}, may differ: {list(self.may_differ)}"


class SiteLost(Exception):  # noqa: N818
    """Ends the program of a site that lost another."""


class LeftError(Exception):
    """An error of the program itself, which ends it."""


class Site(ABC):
    """A site of a trial; a protocol defines its steps.

    Args:
        process: process that it runs in.
        trial: settings and faults of the execution.

    Attributes:
        name: number of the site, the same in all memberships.
        network: network of the sites, after `enter`.
        store: store through which the sites met.
        rank: rank among them.
        others: ranks of the others, in the order in which a site of `TorchComm` waits for them.
        blames_itself: whether it knows, when a wait has taken too long, that it stood still.
        longest_wait_s: seconds of its longest wait in the step under way, before the current one.
        ending: report on how it ended.
    """

    blames_itself = False

    network: Network
    store: Store

    def __init__(self, process: Process, trial: Trial) -> None:
        self.process, self.trial = process, trial
        self.world: World = process.world
        self.name, self.patience_s = process.rank, trial.timeout_s
        self.rank, self.others = self.name, list[int]()
        self.ending = Ending()
        self._waits_since: float | None = None
        self.longest_wait_s = 0.0
        self._damaged = {
            (f.step, f.site) for f in trial.faults if f.kind == "damage" and f.other == self.name
        }
        self._leaves = {f.step for f in trial.faults if f.kind == "leave" and f.site == self.name}

    def enter(self, network: Network, store: Store, rank: int, sites: int) -> None:
        """Takes a place among the sites of a membership."""
        self.network, self.store, self.rank = network, store, rank
        self.others = [(rank - k) % sites for k in range(1, sites)]

    def program(self) -> Waiting[None]:
        """Runs a training loop, and its end."""
        try:
            yield from self.arrive()
            yield from self._train()
            self.ending.done = True
        except (SiteLost, LeftError) as error:
            self.ending.left = isinstance(error, LeftError)
            yield from self.end_after(error)
        self.note("ends" + (": " + str(self.ending)))
        if not self.trial.stays or not self.ending.done:
            yield from self.process.sleep(self.world.dice.random() ** 4 * 0.1)  # often at once
            self.process.end()

    def _train(self) -> Waiting[None]:
        while self.ending.applied < self.trial.steps:
            yield from self._compute(self.ending.applied)
            if self.ending.applied in self._leaves:
                raise LeftError
            with self.timed():
                yield from self.step()
        yield from self._compute(self.trial.steps)
        with self.timed():
            yield from self.settle()

    def _compute(self, step: int) -> Waiting[None]:
        long = (self.name, step) in self.trial.busy
        for_s = 3.2 * self.patience_s if long else self.world.dice.random() * _COMPUTES_S
        yield from self.process.sleep(for_s)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measures the seconds of the block, without pauses of the process."""
        began, stood_s = self.world.now, self.process.paused_s
        network, rank = self.network, self.rank
        network.listening[rank] = True
        try:
            yield
        finally:
            network.listening[rank] = False
            took_s = self.world.now - began - (self.process.paused_s - stood_s)
            self.ending.longest_s = max(self.ending.longest_s, took_s)

    def note(self, what: str) -> None:
        """Traces an action of this site."""
        self.world.note(self.name, what)

    # -- for a protocol to define -------------------------------------------------------------

    @abstractmethod
    def arrive(self) -> Waiting[None]:
        """Takes its place among the sites."""

    @abstractmethod
    def step(self) -> Waiting[None]:
        """Makes one step, and applies it or not.

        Raises:
            SiteLost: the site does not go on.
        """

    def settle(self) -> Waiting[None]:
        """Ends the session after the last step."""
        yield from ()

    def end_after(self, error: Exception) -> Waiting[None]:
        """Reacts to an error that the program has raised."""
        yield from ()

    # -- for protocols to use -----------------------------------------------------------------

    def apply(self, step: int, parts: set[int]) -> None:
        """Applies a step, and notes what is wrong about it.

        Args:
            step: number of the step.
            parts: sites whose messages of the step are there, undamaged.
        """
        if step != self.ending.applied:
            self.ending.wrong.append(f"applied step {step} after {self.ending.applied} steps")
        if parts != {self.rank, *self.others}:
            self.ending.wrong.append(f"applied step {step} with the messages of {parts} alone")
        self.ending.applied += 1
        self.note(f"applies step {step}")

    def is_damaged(self, step: int, sender: int) -> bool:
        """True if a message arrived damaged, which happens once."""
        damaged = (step, sender) in self._damaged
        self._damaged.discard((step, sender))
        return damaged

    def send(self, lane: int, message: object) -> Waiting[None]:
        """Sends to all others, one after the other: other events may happen in between.

        Raises:
            ExchangeError: a connection is closed.
        """
        for other in reversed(self.others):
            self.network.send(self.rank, other, lane, message)
            yield self.world.now

    def receive_all(self, lane: int) -> Waiting[dict[int, object]]:
        """Receives a message of every other site, each within T of the one before.

        Raises:
            ExchangeError: a site is late, or its connection closed.
        """
        found, began = dict[int, object](), self.world.now
        self._waits_since = began
        try:
            for other in self.others:
                found[other] = yield from self.receive(lane, other)
        except ExchangeError as error:
            error.waited_s = self.world.now - began
            raise
        finally:
            self.longest_wait_s, self._waits_since = self.waits_s, None
        return found

    @property
    def waits_s(self) -> float:
        """Seconds of its longest wait in the step, the current one included."""
        since = self._waits_since
        return max(self.longest_wait_s, 0.0 if since is None else self.world.now - since)

    def receive(self, lane: int, other: int) -> Waiting[object]:
        """Receives the next message of a lane from one site, within T."""
        until, inbox = self.world.now + self.patience_s, self.network.inbox(self.rank, other, lane)
        sites = () if self.trial.sums and lane == MESSAGES and len(self.others) > 1 else (other,)
        closed = self.network.closed[self.rank]
        is_there = lambda: inbox or other in closed  # noqa: E731
        while not inbox:
            if other in closed:
                raise ExchangeError("closed", sites, kind=Failure.CLOSED)
            if self.world.now >= until:
                self.network.close_all(self.rank)  # so does gloo
                if self.blames_itself and self.world.now > until + _STILL_S:
                    raise ExchangeError("this site stood still", kind=Failure.LOCAL)
                raise ExchangeError("timed out", sites, kind=Failure.TIMEOUT)
            yield until, is_there
        return inbox.popleft()
