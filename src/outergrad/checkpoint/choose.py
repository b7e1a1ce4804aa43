"""Selection of the checkpoint that the sites resume from, and of the reader of each file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from outergrad.checkpoint.folder import Listing, Save

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
        bad: files that cannot be read.
    """

    listings: Sequence[Listing]
    numbers: Sequence[int]
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
        lines = [f"site {rank}: {one.problem}" for rank, one in seen if one.problem]
        strangers = self.strangers(save)
        if self.cut_short(save):
            lines.append(f"{save} was never finished: it has {self._files(save)}")
        elif not self.whole(save):
            lines.append(f"{save} has {self._files(save)}")
        if strangers:
            names = " and ".join(f"site {rank}" for rank in strangers)
            lines.append(f"{save} is foreign to {names}: only others there")
        return lines

    def _files(self, save: Save) -> str:
        names = ", ".join(f"site-{number}.pt" for number in self.holders(save)) or "none"
        return f"{names} of {save.sites} files"
