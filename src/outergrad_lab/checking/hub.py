"""Simulated runs of sites that may go on without others, or with more, as a hub opens them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outergrad.commit.membership_record import COMING
from outergrad_lab.checking.network import Network, Store
from outergrad_lab.checking.trial import Trial
from outergrad_lab.checking.world import Process, World

_NOTICES_S = 0.3
"""Longest seconds until the hub says that a process is gone."""

History = tuple[object, ...]
"""Steps that a site has applied, or been handed over."""


@dataclass
class Epoch:
    """One run: the sites of a membership, from its beginning to the next one.

    Attributes:
        number: how many memberships were before.
        names: sites by rank.
        network: their connections.
        store: their board.
        coming: names of those that join at its beginning.
        start: steps that its members had made before, once one of them has begun.
    """

    number: int
    names: tuple[int, ...]
    network: Network
    store: Store
    coming: tuple[int, ...] = ()
    start: History | None = None


@dataclass
class Hub:
    """Opens one epoch after another, and says who is gone.

    Args:
        world: clock and random numbers.
        processes: processes of all sites, by name; those that come later, too.
        trial: settings and faults of the execution.

    Attributes:
        epochs: all so far.
        wrong: promises that were broken: two opinions of a membership, members that differ.
    """

    world: World
    processes: Sequence[Process]
    trial: Trial
    epochs: list[Epoch] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting: list[int] = []
        self._gone = set[int]()
        self.unreachable = set[int]()
        self._open(tuple(range(self.trial.sites)), ())
        for name, process in enumerate(self.processes):
            process.on_end.append(lambda name=name: self._ends(name))

    def go_on(self, before: Epoch, sites: Sequence[int], coming: Sequence[str]) -> Epoch:
        """Returns the epoch behind another one; the first site that asks opens it.

        Args:
            before: epoch of the site that asks.
            sites: ranks, in that epoch, of the sites that go on.
            coming: names of the sites that join.
        """
        joining = tuple(map(int, coming))
        names = (*(before.names[site] for site in sites), *joining)
        if before is self.epochs[-1]:
            self._waiting = [name for name in self._waiting if name not in joining]
            self._open(names, joining)
        found = self.epochs[before.number + 1]
        if found.names != names:
            self.wrong.append(f"opinions: {names} go on, and {found.names} do")
        return found

    def waits(self, name: int) -> None:
        """A site waits to be admitted."""
        self._waiting.append(name)
        self._announce()

    def begins(self, epoch: Epoch, name: int, history: History) -> None:
        """A member begins an epoch with the steps that it has."""
        if epoch.start is None:
            epoch.start = history
        elif epoch.start != history:
            self.wrong.append(f"apart: site {name} goes on after {history}, others {epoch.start}")

    def cut(self, name: int) -> None:
        """A site cannot reach the hub any more, which notices that in the end."""
        self.unreachable.add(name)
        for epoch in self.epochs:
            self._cut_in(epoch, name)
        self._ends(name)

    def _open(self, names: tuple[int, ...], coming: tuple[int, ...]) -> None:
        members = [self.processes[name] for name in names]
        network = Network(self.world, members, self.trial)
        host = self.trial.host if self.trial.min_sites is None else None
        store = Store(self.world, self.processes, network, host)
        self.epochs.append(Epoch(len(self.epochs), names, network, store, coming))
        for name in self.unreachable:
            self._cut_in(self.epochs[-1], name)
        for name in self._gone:
            self._say_gone(self.epochs[-1], name)
        self._announce()

    def _announce(self) -> None:
        waiting = [name for name in self._waiting if self.processes[name].alive]
        if waiting:
            store = self.epochs[-1].store
            store.set_first(COMING, " ".join(map(str, waiting)))

    def _cut_in(self, epoch: Epoch, name: int) -> None:
        if epoch.store.host is None:
            epoch.store.unreachable.add(name)
        if name in epoch.names:
            rank = epoch.names.index(name)
            for other in set(range(len(epoch.names))) - {rank}:
                epoch.network.cut(rank, other)

    def _ends(self, name: int) -> None:
        if self.trial.min_sites is not None:
            later_s = self.world.dice.random() * _NOTICES_S
            self.world.at(self.world.now + later_s, self._notice, name)

    def _notice(self, name: int) -> None:
        self._gone.add(name)
        for epoch in self.epochs:
            self._say_gone(epoch, name)

    @staticmethod
    def _say_gone(epoch: Epoch, name: int) -> None:
        if name in epoch.names:
            epoch.store.gone.add(epoch.names.index(name))
            epoch.store.touch()
