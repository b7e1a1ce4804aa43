"""Who goes on from whom, and what each site gets of what another saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outergrad.checkpoint.choose import Selection
from outergrad.checkpoint.parts import for_a_new_site
from outergrad.checkpoint.restored import Restored
from outergrad.core.types import StateDict

_UNSENT = ("unsent", "unsent_deltas", "unsent_activations", "unsent_velocity")
"""What a memory holds that no other site may see."""


@dataclass(frozen=True)
class Cast:
    """Who goes on from whom.

    Attributes:
        selection: the checkpoint, and who reads which file.
        rank_then: of the sites whose files are there, by number.
        numbers: of the sites that there are, by rank.
    """

    selection: Selection
    rank_then: Mapping[int, int]
    numbers: Sequence[int]

    @property
    def same(self) -> bool:
        """Whether every site is what it was."""
        then = {rank: number for number, rank in self.rank_then.items()}
        return dict(enumerate(self.numbers)) == then and not self.selection.lost

    @property
    def new(self) -> tuple[int, ...]:
        """The numbers of sites whose file is not there."""
        return tuple(n for n in self.numbers if n not in self.rank_then)

    def restored(self, skipped: Sequence[str]) -> Restored:
        """In words."""
        return Restored(
            step=self.selection.save.step,
            saved_sites=self.selection.save.sites,
            sites=len(self.numbers),
            lost=self.selection.lost,
            new=self.new,
            skipped=tuple(skipped),
        )

    def letters(self, read: Mapping[int, StateDict], rank: int) -> list[StateDict]:
        """What one site gets of all that this one has read.

        Args:
            read: states as they were saved, by the number of the site that saved them.
            rank: of the one that gets them.
        """
        to = self.numbers[rank]
        wanted = {n: state for n, state in read.items() if n == to or not self.same}
        return [self._letter(state, number, rank) for number, state in wanted.items()]

    def _letter(self, state: StateDict, number: int, rank: int) -> StateDict:
        to, first = self.numbers[rank], min(self.rank_then, key=self.rank_then.__getitem__)
        letter = {"rank": state["rank"], "session": self._session(state, rank)}
        if to == number:
            return letter | {"parts": state["parts"], "random": state["random"]}
        if to in self.new and number == first:  # whom new ones are like
            parts = for_a_new_site(state["parts"], state["own"])
            return letter | {"parts": parts, "random": None}
        return letter

    def _session(self, state: StateDict, rank: int) -> StateDict | None:
        """What a site owes goes only to the one that takes it over."""
        session, then = state["session"], state["rank"]
        if session is None or self.same:
            return session
        like = rank % self.selection.save.sites
        start = then == (like if like in self.rank_then.values() else min(self.rank_then.values()))
        takes_over = then % len(self.numbers) == rank
        return session if takes_over else _without_debts(session, start=start)


def with_lost(states: Mapping[int, StateDict], sites: int) -> list[StateDict]:
    """The states of all sites that there were; those of lost ones as if they owed nothing.

    Args:
        states: those that there are, by rank; at least one.
        sites: how many there were.
    """
    pattern = _without_debts(states[min(states)], start=True)
    return [states.get(rank, {**pattern, "rank": rank}) for rank in range(sites)]


def _without_debts(session: StateDict, *, start: bool) -> StateDict:
    """A session's state without what it owes; enough for sites that do not take that over.

    Args:
        session: as it was saved.
        start: whether to leave the weights that `og.LocalSteps` starts from.
    """
    found = {
        **session,
        "exchanges": list(map(_sent, session["exchanges"])),
        "cadence": {**session["cadence"], "formed": {}, "rows": {}, "formed_rows": {}},
    }
    if not start:
        found.pop("local_steps", None)
    return found


def _sent(compressor: StateDict) -> StateDict:
    """Its memories without what has not been sent."""
    own = compressor.get("own", {})
    if "memories" not in own:
        return compressor
    saved: Mapping[str, Mapping[str, Any]] = own["memories"]
    memories = {
        place: {key: value for key, value in memory.items() if key not in _UNSENT}
        for place, memory in saved.items()
    }
    return {**compressor, "own": {**own, "memories": memories}}
