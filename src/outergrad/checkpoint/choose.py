"""Which checkpoint the sites go on from, and who reads which of its files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from outergrad.checkpoint.folder import Save

Listing = Mapping[Save, Collection[int]]
"""What a site has: of every checkpoint, the numbers of the sites whose files it sees."""

Bad = tuple[int, Save, int]
"""The rank of a site that could not read a file, and which: of a checkpoint and a site."""


@dataclass(frozen=True)
class Choice:
    """What to go on from.

    Attributes:
        save: the checkpoint.
        readers: per number of a site that saved it, the rank of the one that reads its file.
    """

    save: Save
    readers: Mapping[int, int]

    @property
    def lost(self) -> int:
        """Of how many sites that saved it nothing is left."""
        return self.save.sites - len(self.readers)


def choose(
    listings: Sequence[Listing],
    numbers: Sequence[int],
    bad: Collection[Bad],
    *,
    allow_lost: bool,
) -> Choice | None:
    """The newest checkpoint of which all files are there, somewhere.

    Args:
        listings: what every site has.
        numbers: of every site, its number: each reads its own file if it can.
        bad: files that cannot be read.
        allow_lost: whether one that lacks files will do where none is whole.
    """
    holders = _holders(listings, bad)
    usable = [save for save, found in holders.items() if len(found) == save.sites]
    if not usable and allow_lost:
        usable = [save for save, found in holders.items() if found]
    if not usable:
        return None
    save = max(usable)
    readers = {
        number: next((r for r in ranks if numbers[r] == number), ranks[0])
        for number, ranks in sorted(holders[save].items())
    }
    return Choice(save, readers)


def passed_over(
    listings: Sequence[Listing], choice: Choice | None, bad: Collection[Bad]
) -> list[str]:
    """What is newer but cannot be used, and why."""
    holders = _holders(listings, bad)
    newer = [save for save in sorted(holders) if choice is None or save > choice.save]
    return [f"{save} has {_found(holders[save])} of {save.sites} files" for save in newer]


def _found(holders: Mapping[int, object]) -> str:
    return ", ".join(f"site-{number}.pt" for number in sorted(holders)) or "none"


def _holders(listings: Sequence[Listing], bad: Collection[Bad]) -> dict[Save, dict[int, list[int]]]:
    """Of every checkpoint, per site that saved it, the ranks that can read its file."""
    found: dict[Save, dict[int, list[int]]] = {}
    for rank, listing in enumerate(listings):
        for save, numbers in listing.items():
            ranks_of = found.setdefault(save, {})
            for number in numbers:
                if (rank, save, number) not in bad:
                    ranks_of.setdefault(number, []).append(rank)
    return found
