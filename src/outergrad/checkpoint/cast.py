"""Assignment of saved states to sites: the state that each site resumes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outergrad.checkpoint.choose import Selection
from outergrad.checkpoint.parts import for_a_new_site
from outergrad.core.types import StateDict


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Summary of what `og.Checkpoints.restore` found.

    Attributes:
        step: number of completed steps when it was saved.
        saved_sites: number of sites that saved it.
        sites: number of sites now.
        lost: number of the saving sites of which nothing is left.
        new: numbers of the present sites of which it holds nothing.
        skipped: newer checkpoints and files that could not be used, and why.
    """

    step: int
    saved_sites: int
    sites: int
    lost: int = 0
    new: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """True if training continues bit for bit as without the interruption."""
        return self.sites == self.saved_sites and not self.lost and not self.new

    def __str__(self) -> str:
        lines = [f"going on after step {self.step}"]
        if self.sites != self.saved_sites:
            lines[0] += f", saved by {self.saved_sites} sites, at {self.sites}"
            lines.append("what the sites had not sent yet is shared out among them")
        if self.lost:
            lines.append(f"what {self.lost} of them had not sent and kept to themselves is lost")
        if self.new:
            names = ", ".join(f"site {number}" for number in self.new)
            lines.append(f"{names}: new, with the others' model and nothing that is a site's own")
        return "; ".join(lines)


_UNSENT = ("unsent", "unsent_deltas", "unsent_activations", "unsent_velocity")
"""Entries of a method's memory that no other site may see."""


@dataclass(frozen=True)
class Cast:
    """Assignment of the states in a checkpoint to the present sites.

    Attributes:
        selection: the checkpoint, and the reader of each file.
        rank_then: rank at the time of saving, by the number of each site whose file is there.
        numbers: numbers of the present sites, by rank.
    """

    selection: Selection
    rank_then: Mapping[int, int]
    numbers: Sequence[int]

    @property
    def same(self) -> bool:
        """True if every site has the rank that it had, and no file is lost."""
        then = {rank: number for number, rank in self.rank_then.items()}
        return dict(enumerate(self.numbers)) == then and not self.selection.lost

    @property
    def new(self) -> tuple[int, ...]:
        """Numbers of the sites whose file is not there."""
        return tuple(n for n in self.numbers if n not in self.rank_then)

    def restored(self, skipped: Sequence[str]) -> Restored:
        """Returns a summary for the user."""
        return Restored(
            step=self.selection.save.step,
            saved_sites=self.selection.save.sites,
            sites=len(self.numbers),
            lost=self.selection.lost,
            new=self.new,
            skipped=tuple(skipped),
        )

    def letters(self, read: Mapping[int, StateDict], rank: int) -> list[StateDict]:
        """Returns the states that this site sends to one site, of all that it has read.

        Args:
            read: saved states, by the number of the site that saved them.
            rank: rank of the site that receives them.
        """
        to = self.numbers[rank]
        wanted = {n: state for n, state in read.items() if n == to or not self.same}
        return [self._letter(state, number, rank) for number, state in wanted.items()]

    def _letter(self, state: StateDict, number: int, rank: int) -> StateDict:
        to, first = self.numbers[rank], min(self.rank_then, key=self.rank_then.__getitem__)
        letter = {"rank": state["rank"], "session": self._session(state, rank)}
        if to == number:
            return letter | {"parts": state["parts"], "random": state["random"]}
        if to in self.new and number == first:  # new sites get its state
            parts = for_a_new_site(state["parts"], state["own"])
            return letter | {"parts": parts, "random": None}
        return letter

    def _session(self, state: StateDict, rank: int) -> StateDict | None:
        """Returns a session's state; unsent residuals go only to the site that takes them over."""
        session, then = state["session"], state["rank"]
        if session is None or self.same:
            return session
        like = rank % self.selection.save.sites
        start = then == (like if like in self.rank_then.values() else min(self.rank_then.values()))
        takes_over = then % len(self.numbers) == rank
        return session if takes_over else _without_debts(session, start=start)


def with_lost(states: Mapping[int, StateDict], sites: int) -> list[StateDict]:
    """Returns the states of all sites that saved; a lost site's state has nothing unsent.

    Args:
        states: available states, by rank; at least one.
        sites: number of sites that saved.
    """
    pattern = _without_debts(states[min(states)], start=True)
    return [states.get(rank, {**pattern, "rank": rank}) for rank in range(sites)]


def _without_debts(session: StateDict, *, start: bool) -> StateDict:
    """Returns a session's state without unsent gradients and residuals: enough for other sites.

    Args:
        session: state as it was saved.
        start: whether to keep the weights that `og.LocalSteps` starts from.
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
    """Returns a compressor's state without what has not been sent."""
    own = compressor.get("own", {})
    if "memories" not in own:
        return compressor
    saved: Mapping[str, Mapping[str, Any]] = own["memories"]
    memories = {
        place: {key: value for key, value in memory.items() if key not in _UNSENT}
        for place, memory in saved.items()
    }
    return {**compressor, "own": {**own, "memories": memories}}
