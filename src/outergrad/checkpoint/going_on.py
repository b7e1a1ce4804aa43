"""The sites find a checkpoint together, and each gets of it what it goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outergrad._protocols import Comm
from outergrad._types import StateDict
from outergrad.checkpoint.choose import Bad, Choice, Listing, choose, passed_over
from outergrad.checkpoint.debts import with_lost, without_debts
from outergrad.checkpoint.folder import DamagedError, Save, read_site, saves_in
from outergrad.checkpoint.parts import for_a_new_site
from outergrad.checkpoint.restored import Restored
from outergrad.checkpoint.talk import gathered, packed, swapped, unpacked
from outergrad.comm.agree import agree

Read = dict[int, StateDict]
"""What a site has read: states by the number of the site that saved them."""


@dataclass(frozen=True)
class GoingOn:
    """What this site goes on from.

    Attributes:
        save: the checkpoint.
        restored: the same in words.
        parts: states of model, optimizer and others.
        random: random streams, if it is what this very site saved.
        session: what to give to `load_state_dict`, if there was a session.
    """

    save: Save
    restored: Restored
    parts: StateDict
    random: StateDict | None
    session: StateDict | list[StateDict] | None


@dataclass(frozen=True)
class _Cast:
    """Who goes on from whom.

    Attributes:
        choice: the checkpoint, and who reads which file.
        rank_then: of the sites whose files are there, by number.
        numbers: of the sites that there are, by rank.
    """

    choice: Choice
    rank_then: Mapping[int, int]
    numbers: Sequence[int]

    @property
    def same(self) -> bool:
        """Whether every site is what it was."""
        then = {rank: number for number, rank in self.rank_then.items()}
        return dict(enumerate(self.numbers)) == then and not self.choice.lost

    @property
    def new(self) -> tuple[int, ...]:
        """The numbers of sites whose file is not there."""
        return tuple(n for n in self.numbers if n not in self.rank_then)

    @property
    def example(self) -> int:
        """The number of the site that new ones are like: the first."""
        return min(self.rank_then, key=lambda number: self.rank_then[number])

    def restored(self, skipped: Sequence[str]) -> Restored:
        """In words."""
        return Restored(
            step=self.choice.save.step,
            saved_sites=self.choice.save.sites,
            sites=len(self.numbers),
            lost=self.choice.lost,
            new=self.new,
            skipped=tuple(skipped),
        )

    def letter(self, state: StateDict, number: int, rank: int) -> StateDict | None:
        """What one site gets of a state that another saved.

        Args:
            state: as it was saved.
            number: of the site that saved it.
            rank: of the one that gets it.
        """
        to = self.numbers[rank]
        if self.same and to != number:
            return None
        letter = {"rank": state["rank"], "session": self._session(state, rank)}
        if to == number:
            letter |= {"parts": state["parts"], "random": state["random"]}
        elif to in self.new and number == self.example:
            parts = for_a_new_site(state["parts"], state["own"])
            letter |= {"parts": parts, "random": None}
        return letter

    def _session(self, state: StateDict, rank: int) -> StateDict | None:
        """What a site owes goes only to the one that takes it over."""
        session, then = state["session"], state["rank"]
        if session is None or self.same:
            return session
        like = rank % self.choice.save.sites
        start = then == (like if like in self.rank_then.values() else min(self.rank_then.values()))
        takes_over = then % len(self.numbers) == rank
        return session if takes_over else without_debts(session, start=start)


def found_by_all(
    comm: Comm, folder: Path, number: int, *, allow_lost: bool
) -> tuple[GoingOn | None, list[str]]:
    """The newest checkpoint that can be used, and why newer ones cannot.

    Args:
        comm: the transport.
        folder: of this site.
        number: of this site.
        allow_lost: whether files may be missing where no checkpoint is whole.

    Raises:
        OSError: this site cannot look into its folder.
        ValueError: another one cannot.
    """
    listings, numbers = _listings(comm, folder, number)
    skipped: list[str] = []
    bad: set[Bad] = set()
    while True:
        choice = choose(listings, numbers, bad, allow_lost=allow_lost)
        if choice is None:
            return None, [*skipped, *passed_over(listings, None, bad)]
        read, failed = _read(comm.rank, folder, choice)
        told = gathered(comm, {"failed": failed, "ranks": {n: s["rank"] for n, s in read.items()}})
        skipped += [line for one in told for line in one["failed"].values()]
        bad |= {(r, choice.save, int(n)) for r, one in enumerate(told) for n in one["failed"]}
        if not any(one["failed"] for one in told):
            break
    skipped += passed_over(listings, choice, bad)
    ranks = {int(n): rank for one in told for n, rank in one["ranks"].items()}
    return _received(comm, _Cast(choice, ranks, numbers), read, skipped), skipped


def _listings(comm: Comm, folder: Path, number: int) -> tuple[Sequence[Listing], Sequence[int]]:
    mine: dict[Save, list[int]] = {}
    error = None
    try:
        mine = saves_in(folder)
    except OSError as raised:
        error = raised
    agree(comm, ["folder: can be read"], error)
    saves = [[s.step, s.sites, s.id, files] for s, files in mine.items()]
    told = gathered(comm, [number, saves])
    listings = [{Save(*name): files for *name, files in saves} for _, saves in told]
    return listings, [number for number, _ in told]


def _read(rank: int, folder: Path, choice: Choice) -> tuple[Read, dict[int, str]]:
    """The files that this site is to read, and what is wrong with those that it cannot."""
    read, failed = Read(), dict[int, str]()
    for number, reader in choice.readers.items():
        if reader == rank:
            try:
                read[number] = read_site(folder, choice.save, number)
            except DamagedError as error:
                failed[number] = f"site {rank}: {error}"
    return read, failed


def _received(comm: Comm, cast: _Cast, read: Read, skipped: Sequence[str]) -> GoingOn:
    """Every site sends what it has read to those who need it."""
    letters = [
        [cast.letter(state, number, rank) for number, state in read.items()]
        for rank in range(comm.world_size)
    ]
    sent = [
        packed(some) if any(some) and rank != comm.rank else b""
        for rank, some in enumerate(letters)
    ]
    came = [unpacked(letter) if letter else [] for letter in swapped(comm, sent)]
    came[comm.rank] = letters[comm.rank]
    found = [letter for some in came for letter in some if letter is not None]
    mine = next(letter for letter in found if "parts" in letter)
    sessions = {letter["rank"]: letter["session"] for letter in found}
    session = mine["session"]
    if session is not None and not cast.same:
        session = with_lost(sessions, cast.choice.save.sites)
    return GoingOn(cast.choice.save, cast.restored(skipped), mine["parts"], mine["random"], session)
