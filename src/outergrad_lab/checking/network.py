"""Simulated connections of sites, and the store through which they met."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from outergrad.core.errors import ExchangeError, Failure
from outergrad_lab.checking.trial import Trial
from outergrad_lab.checking.world import Process, Waiting, World

_QUICK_S, _CLOSES_S, _LEAST_S = 0.01, 0.05, 1e-4


class Network:
    """A connection per pair of sites, with lanes: messages of one lane keep their order.

    Args:
        world: clock and random numbers.
        processes: processes of the sites.
        trial: its `longest_s` bounds the delay of messages.

    Attributes:
        closed: for each site, the sites whose connection it has found closed.
        listening: for each site, whether it waits for messages.
        posted: lanes whose receives are always posted in advance: what arrived is not lost.
    """

    def __init__(self, world: World, processes: Sequence[Process], trial: Trial) -> None:
        self._world, self._processes, self._longest_s = world, processes, trial.longest_s
        self.closed: list[set[int]] = [set() for _ in processes]
        self._inboxes: defaultdict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
        self._latest: defaultdict[tuple[int, int, int], float] = defaultdict(float)
        self._ends: dict[tuple[int, int], float] = {}
        self._cut: set[tuple[int, int]] = set()
        self.listening = [False for _ in processes]
        self.posted = set[int]()
        for rank, process in enumerate(processes):
            process.on_end.append(lambda rank=rank: self.close_all(rank))

    def inbox(self, site: int, sender: int, lane: int) -> deque[Any]:
        """Returns the messages of a lane that arrived and were not read yet."""
        return self._inboxes[sender, site, lane]

    def send(self, sender: int, site: int, lane: int, message: object) -> None:
        """Sends a message, which arrives later, unless the connection ends before.

        Raises:
            ExchangeError: the connection is closed.
        """
        if site in self.closed[sender]:
            raise ExchangeError("closed", (site,), kind=Failure.CLOSED)
        dice, way = self._world.dice, (sender, site, lane)
        delay_s = dice.random() * (self._longest_s if dice.random() < 0.2 else _QUICK_S)
        due = max(self._latest[way], self._world.now + _LEAST_S + delay_s)
        self._latest[way] = due
        self._world.at(due, self._arrive, way, message)

    def _arrive(self, way: tuple[int, int, int], message: object) -> None:
        sender, site, _ = way
        lost = (sender, site) in self._cut or self._world.now > self._ends.get(way[:2], 1e9)
        if not lost and sender not in self.closed[site]:
            self._processes[site].reached_by(self._inboxes[way].append, message)

    def close_all(self, site: int) -> None:
        """Closes a site's connections; the others notice at once, or nearly so."""
        for other in range(len(self._processes)):
            if other != site:
                self.close(site, other)

    def close(self, site: int, other: int) -> None:
        """Closes a connection; messages under way arrive up to some moment."""
        for ways in ((site, other), (other, site)):
            if ways not in self._ends:
                end = self._world.now + self._world.dice.random() * _CLOSES_S
                self._ends[ways] = end
                self._world.at(end, self._notice, *ways)

    def _notice(self, sender: int, site: int) -> None:
        """Lets a site notice the end; its last messages may be lost if it was not receiving."""
        if (sender, site) not in self._cut:
            self._processes[site].reached_by(self._forget, sender, site)

    def _forget(self, sender: int, site: int) -> None:
        self.closed[site].add(sender)
        for way, unread in self._inboxes.items():
            safe = self.listening[site] or way[2] in self.posted
            if way[:2] == (sender, site) and unread and not safe:
                for _ in range(self._world.dice.randrange(len(unread) + 1)):
                    unread.pop()

    def cut(self, site: int, other: int) -> None:
        """Drops all messages between two sites from now on, without notice."""
        self._cut |= {(site, other), (other, site)}

    def is_cut(self, site: int, other: int) -> bool:
        """True if messages between two sites are dropped."""
        return (site, other) in self._cut


class StoreGoneError(Exception):
    """A call of the store was not answered in time."""


class Store:
    """Keys and values, each call of which is one event in some order.

    Args:
        world: clock and random numbers.
        processes: processes of the sites.
        network: network, whose cuts keep sites from the host.
        host: site that holds the store and with which it ends, if any.

    Attributes:
        values: values by key.
        changes: number of writes.
        slow_until: time until which a call takes seconds.
        dead: whether it does not answer any more.
        unreachable: sites that cannot reach it.
        gone: sites of which it says that they write nothing more, as a hub does.
    """

    def __init__(
        self, world: World, processes: Sequence[Process], network: Network, host: int | None
    ) -> None:
        self._world, self._processes, self._network, self.host = world, processes, network, host
        self.values: dict[str, Any] = {}
        self.changes, self.slow_until, self.dead = 0, 0.0, False
        self.unreachable, self.gone = set[int](), set[int]()

    def call(self, process: Process, do: Callable[[], Any], within_s: float) -> Waiting[Any]:
        """Runs an operation in the store.

        Raises:
            StoreGoneError: no answer came in time; the operation may have run nevertheless.
        """
        world, answers = self._world, list[Any]()
        began, until = world.now, world.now + within_s
        took_s = world.dice.random() * (4.0 if began < self.slow_until else 0.005)
        done_s = took_s * world.dice.random()
        world.at(began + done_s, self._do, process, do, answers, began + took_s)
        while not answers:
            if world.now >= until:
                raise StoreGoneError
            yield until, answers.__len__
        return answers[0]

    def set(self, key: str, value: object) -> None:
        """Writes a value, inside a call; sites that wait for a change see it soon."""
        self.values[key] = value
        self.touch()

    def set_first(self, key: str, value: object) -> object:
        """Writes a value unless there is one, inside a call; returns the value that is there."""
        if key not in self.values:
            self.set(key, value)
        return self.values[key]

    def touch(self) -> None:
        """Wakes all that wait for a change."""
        self.changes += 1
        for process in self._processes:
            later = self._world.now + self._world.dice.random() * 0.02
            self._world.at(later, process.reached_by, _nothing)

    def _do(
        self, process: Process, do: Callable[[], Any], answers: list[Any], answered: float
    ) -> None:
        if self._is_there_for(process.rank):
            result = do()
            self._world.at(answered, process.reached_by, answers.append, result)

    def _is_there_for(self, site: int) -> bool:
        host = self.host
        if self.dead or site in self.unreachable:
            return False
        return host is None or (
            self._processes[host].alive
            and not self._processes[host].paused
            and not self._network.is_cut(site, host)
        )


def _nothing() -> None:
    pass
