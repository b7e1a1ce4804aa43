"""Who goes on from whom, and what each site gets of what another saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outergrad.checkpoint.choose import Choice
from outergrad.checkpoint.parts import for_a_new_site
from outergrad.checkpoint.residuals import without_debts
from outergrad.checkpoint.restored import Restored
from outergrad.core.types import StateDict


@dataclass(frozen=True)
class Cast:
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

    def letters(self, read: Mapping[int, StateDict], rank: int) -> list[StateDict]:
        """What one site gets of all that this one has read."""
        found = [self.letter(state, number, rank) for number, state in read.items()]
        return [letter for letter in found if letter is not None]

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
