"""The sites find a checkpoint together, and each gets of it what it goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outergrad.checkpoint import claims
from outergrad.checkpoint.cast import Cast
from outergrad.checkpoint.choose import Allowed, Choice, Overview
from outergrad.checkpoint.folder import DamagedError, Listing, Save, read_site, saves_in
from outergrad.checkpoint.messaging import gathered, packed, swapped, unpacked
from outergrad.checkpoint.residuals import with_lost
from outergrad.checkpoint.restored import Restored
from outergrad.checkpoint.unusable import require_nothing
from outergrad.comm.agree import agree
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict

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
class Found:
    """What came of looking for a checkpoint.

    Attributes:
        going_on: what this site goes on from; None if there is nothing.
        skipped: newer checkpoints and files that could not be used, and why.
        older: whole checkpoints before that one.
        cut_short: those that were never finished.
    """

    going_on: GoingOn | None
    skipped: Sequence[str]
    older: Sequence[Save] = ()
    cut_short: Sequence[Save] = ()


def found_by_all(comm: Comm, folder: Path, numbers: Sequence[int], allowed: Allowed) -> Found:
    """Finds the newest checkpoint that can be used, and why newer ones cannot.

    Args:
        comm: the transport.
        folder: of this site.
        numbers: of the sites, by rank.
        allowed: what may be missing.

    Raises:
        OSError: this site cannot look into its folder.
        UnusableError: on all sites: there is something, and none of it can be used.
        ValueError: another one cannot look into its folder, or says what cannot be.
    """
    overview = Overview(_listings(comm, folder, allowed), numbers)
    skipped: list[str] = []
    read, ranks = Read(), dict[int, int]()
    while choice := overview.choose(allowed):
        read, ranks, failed = _read_by_all(comm, folder, choice)
        if not failed:
            break
        skipped += failed.values()
        overview = replace(overview, bad=overview.bad | failed.keys())
    skipped += overview.passed_over(choice)
    if choice is None:
        require_nothing(overview, folder, skipped)
        return Found(None, skipped)
    going_on = _received(comm, Cast(choice, ranks, numbers), read, skipped)
    older = [save for save in overview.saves if save < choice.save and overview.whole(save)]
    return Found(going_on, skipped, older, list(filter(overview.cut_short, overview.saves)))


def _listings(comm: Comm, folder: Path, allowed: Allowed) -> list[Listing]:
    mine: Listing = {}
    error = None
    try:
        mine = saves_in(folder)
    except OSError as raised:
        error = raised
    same = "call restore with the same arguments on every site"
    agree(comm, [f"allowed: {allowed}"], error, same)
    told = gathered(comm, claims.listed(mine))
    return [*claims.understood(told, claims.listing, "its checkpoints")]


def _read_by_all(
    comm: Comm, folder: Path, choice: Choice
) -> tuple[Read, dict[int, int], dict[tuple[int, Save, int], str]]:
    """The states that this site reads, the ranks of all that were read, and what failed."""
    read, failed = _read(comm.rank, folder, choice)
    mine = {"failed": failed, "ranks": {number: state["rank"] for number, state in read.items()}}
    form = claims.outcome(choice.asked(), choice.save.sites)
    told = claims.understood(gathered(comm, mine), form, "the files that it read")
    ranks = {number: then for _, found in told for number, then in found.items()}
    if len({*ranks.values()}) < len(ranks):
        raise ValueError(f"Checkpoints: two files of {choice.save} are of the same site")
    why = {(r, choice.save, n): line for r, (bad, _) in enumerate(told) for n, line in bad.items()}
    return read, ranks, why


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


def _received(comm: Comm, cast: Cast, read: Read, skipped: Sequence[str]) -> GoingOn:
    """Every site sends what it has read to those who need it.

    Raises:
        ValueError: on all sites: a file or a letter has not the content of a checkpoint.
    """
    letters: list[list[StateDict]] = [[] for _ in range(comm.world_size)]
    found, error = None, None
    try:
        letters = [cast.letters(read, rank) for rank in range(comm.world_size)]
    except Exception as raised:  # of content that nobody has checked
        error = raised
    own, letters[comm.rank] = letters[comm.rank], []
    came = swapped(comm, [packed(some) if some else b"" for some in letters])
    try:
        others = [letter for some in came if some for letter in unpacked(some)]
        found = _put_together(cast, [*own, *others], skipped)
    except Exception as raised:
        error = error or raised
    if error is not None:
        error = ValueError(f"Checkpoints: {cast.choice.save} is no checkpoint of ours: {error}")
    agree(comm, [f"read: {cast.choice.save}"], error)
    assert found is not None
    return found


def _put_together(cast: Cast, letters: Sequence[StateDict], skipped: Sequence[str]) -> GoingOn:
    """What the letters come to; this site's own are the first, and count before all others."""
    mine = next((letter for letter in letters if "parts" in letter), None)
    if mine is None:
        raise ValueError("no site has sent this one's part")
    session = mine["session"]
    if session is not None and not cast.same:
        sessions = {letter["rank"]: letter["session"] for letter in reversed(letters)}
        session = with_lost(sessions, cast.choice.save.sites)
    return GoingOn(cast.choice.save, cast.restored(skipped), mine["parts"], mine["random"], session)
