"""Assignment of saved states to sites: the state that each site resumes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from outergrad.checkpoint.folder import Listing, Save
from outergrad.checkpoint.parts import for_a_new_site
from outergrad.core.sites import Site, called
from outergrad.core.types import StateDict

Bad = tuple[int, Save, int]
"""An unreadable file: rank that could not read it, checkpoint, and number of the saving site."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Permissions of the user to resume from a checkpoint that is not complete everywhere.

    Attributes:
        allow_lost: one that lacks files of some sites, where none is complete.
        allow_foreign: one of which a site has no file, though it has others.
    """

    allow_lost: bool = False
    allow_foreign: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name}=True" for name in self.names)

    @property
    def names(self) -> list[str]:
        """Names of the permissions that are given."""
        return [name for name, value in vars(self).items() if value]


_WAYS = (
    Allowed(allow_lost=True),
    Allowed(allow_foreign=True),
    Allowed(allow_lost=True, allow_foreign=True),
)


class UnusableError(ValueError):
    """There are checkpoints, and none can be resumed from; raised on all sites.

    Attributes:
        problems: one line of text per unusable checkpoint or file.
        way: permissions with which one could be used; None if none would help.
    """

    def __init__(self, folder: Path, problems: Sequence[str], way: Allowed | None) -> None:
        self.problems, self.way = tuple(problems), way
        remedy = "mend these files or bring them back, or move the folder away to begin anew"
        if way is not None:
            remedy += f", or let restore({way}) go on with what there is"
        super().__init__(
            f"Checkpoints: the folder {folder} cannot be gone on from, and nothing in it was "
            f"changed: {'; '.join(problems)}. On every site: {remedy}"
        )


@dataclass(frozen=True)
class Selection:
    """Checkpoint to resume from, and the readers of its files.

    Attributes:
        save: the checkpoint.
        readers: rank that reads each file, by the number of the site that saved it.
    """

    save: Save
    readers: Mapping[int, int]

    @property
    def lost(self) -> int:
        """Number of sites that saved the checkpoint and whose files are lost."""
        return self.save.sites - len(self.readers)

    def read_by(self, rank: int) -> list[int]:
        """Returns the numbers of the sites whose files `rank` reads."""
        return [number for number, reader in self.readers.items() if reader == rank]


@dataclass(frozen=True)
class Overview:
    """Checkpoints that the sites see, taken together.

    Attributes:
        listings: listing of every site, by rank.
        numbers: number of every site, by rank: each reads its own file if it can.
        sites: all, for their names.
        bad: files that cannot be read.
    """

    listings: Sequence[Listing]
    numbers: Sequence[int]
    sites: Sequence[Site]
    bad: frozenset[Bad] = frozenset()

    @cached_property
    def saves(self) -> list[Save]:
        """All checkpoints, the oldest first."""
        return sorted({save for listing in self.listings for save in listing})

    def holders(self, save: Save) -> dict[int, list[int]]:
        """Returns, by the number of each site that saved, the ranks that can read its file."""
        found: dict[int, list[int]] = {}
        for rank, listing in enumerate(self.listings):
            for number in listing[save].files if save in listing else ():
                if (rank, save, number) not in self.bad:
                    found.setdefault(number, []).append(rank)
        return dict(sorted(found.items()))

    def whole(self, save: Save) -> bool:
        """True if each file of the checkpoint can be read on some site."""
        return len(self.holders(save)) == save.sites

    def cut_short(self, save: Save) -> bool:
        """True if the checkpoint was never finished, as where sites were killed while writing."""
        marked = any(save in seen and seen[save].unfinished for seen in self.listings)
        return marked and not self.damaged(save) and not self.whole(save)

    def damaged(self, save: Save) -> bool:
        """True if a file of the checkpoint turned out to be unreadable."""
        return any(bad == save for _, bad, _ in self.bad)

    def strangers(self, save: Save) -> list[int]:
        """Returns the ranks without a file of the checkpoint that have another, finished one."""
        return [
            rank
            for rank, listing in enumerate(self.listings)
            if save not in listing and not all(seen.unfinished for seen in listing.values())
        ]

    def choose(self, allowed: Allowed) -> Selection | None:
        """Selects the newest usable checkpoint, and readers of its files; None if there is none."""
        known = [s for s in self.saves if allowed.allow_foreign or not self.strangers(s)]
        usable = [save for save in known if self.whole(save)]
        if not usable and allowed.allow_lost:
            usable = [save for save in known if self.holders(save) and not self.cut_short(save)]
        if not usable:
            return None
        holders = self.holders(usable[-1])
        readers = {
            number: next((rank for rank in ranks if self.numbers[rank] == number), ranks[0])
            for number, ranks in holders.items()
        }
        return Selection(usable[-1], readers)

    def require_nothing(self, folder: Path, problems: Sequence[str]) -> None:
        """Raises unless there has never been a complete checkpoint.

        A first checkpoint that was cut short does not count: training begins anew, as it did then.

        Raises:
            UnusableError: there has been one.
        """
        if not all(map(self.cut_short, self.saves)):
            way = next((way for way in _WAYS if self.choose(way)), None)
            raise UnusableError(folder, problems, way)

    def passed_over(self, selection: Selection | None) -> list[str]:
        """Returns why newer checkpoints cannot be used; damage was noted when they were read."""
        newer = [save for save in self.saves if selection is None or save > selection.save]
        return [line for save in newer if not self.damaged(save) for line in self._why_not(save)]

    def _why_not(self, save: Save) -> list[str]:
        seen = [(rank, found[save]) for rank, found in enumerate(self.listings) if save in found]
        lines = [f"{self.sites[rank].called}: {one.problem}" for rank, one in seen if one.problem]
        strangers = self.strangers(save)
        if self.cut_short(save):
            lines.append(f"{save} was never finished: it has {self._files(save)}")
        elif not self.whole(save):
            lines.append(f"{save} has {self._files(save)}")
        if strangers:
            names = " and ".join(self.sites[rank].called for rank in strangers)
            lines.append(f"{save} is foreign to {names}: only others there")
        return lines

    def _files(self, save: Save) -> str:
        names = ", ".join(f"site-{number}.pt" for number in self.holders(save)) or "none"
        return f"{names} of {save.sites} files"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Summary of what `og.Checkpoints.restore` found.

    Attributes:
        step: number of completed steps when it was saved.
        saved_sites: number of sites that saved it.
        sites: number of sites now.
        lost: number of the saving sites of which nothing is left.
        new: numbers of the present sites of which it holds nothing.
        newcomers: these sites in words.
        skipped: newer checkpoints and files that could not be used, and why.
    """

    step: int
    saved_sites: int
    sites: int
    lost: int = 0
    new: tuple[int, ...] = ()
    newcomers: str = ""
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
            lines.append(
                f"{self.newcomers}: new, with the others' model and nothing that is a site's own"
            )
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
        sites: the present sites, for their names.
    """

    selection: Selection
    rank_then: Mapping[int, int]
    numbers: Sequence[int]
    sites: Sequence[Site]

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
            newcomers=called([s for s in self.sites if self.numbers[s] in self.new]),
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
        session = self._session(state, rank)
        if to == number:
            own = {"parts": state["parts"], "random": state["random"]}
            return {"rank": state["rank"], "session": session} | own
        shown = None if session is None else _without_heard(session)
        letter = {"rank": state["rank"], "session": shown}
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
    pattern = _without_heard(_without_debts(states[min(states)], start=True))
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


def _without_heard(session: StateDict) -> StateDict:
    """Returns a session's state without what its detector of `og.OnDrift` has heard of its data."""
    if "drift" not in session:
        return session
    return {**session, "drift": {**session["drift"], "heard": None}}


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
