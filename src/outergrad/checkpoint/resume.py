"""Resuming: the sites choose a checkpoint together, and send each other the states they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outergrad.checkpoint import claims
from outergrad.checkpoint.cast import Allowed, Cast, Overview, Restored, Selection, with_lost
from outergrad.checkpoint.folder import DamagedError, Listing, Save, read_site, saves_in
from outergrad.checkpoint.messaging import gathered, packed, swapped, unpacked
from outergrad.comm.agree import agree
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict

Read = dict[int, StateDict]
"""States that a site has read, by the number of the site that saved them."""


@dataclass(frozen=True)
class GoingOn:
    """State that this site resumes from.

    Attributes:
        save: the checkpoint.
        restored: summary of it for the user.
        parts: states of model, optimizer and others.
        random: random streams, if this very site saved them.
        session: argument of the session's `load_state_dict`, if there was a session.
    """

    save: Save
    restored: Restored
    parts: StateDict
    random: StateDict | None
    session: StateDict | list[StateDict] | None


def found_by_all(
    comm: Comm, folder: Path, numbers: Sequence[int], allowed: Allowed
) -> tuple[GoingOn | None, list[str], Overview]:
    """Finds the newest checkpoint that can be used, and the reasons why newer ones cannot.

    Args:
        comm: the transport.
        folder: folder of this site.
        numbers: numbers of the sites, by rank.
        allowed: permissions to resume from an incomplete checkpoint.

    Returns:
        State that this site resumes from, if any; lines about newer checkpoints and files that
        could not be used; and all that the sites see.

    Raises:
        OSError: this site cannot look into its folder.
        UnusableError: on all sites: there are checkpoints, and none can be used.
        ValueError: another site cannot look into its folder, or sent a malformed message.
    """
    overview = Overview(_listings(comm, folder, allowed), numbers, comm.sites)
    skipped: list[str] = []
    read, ranks = Read(), dict[int, int]()
    while selection := overview.choose(allowed):
        read, ranks, failed = _read_by_all(comm, folder, selection)
        if not failed:
            break
        skipped += failed.values()
        overview = replace(overview, bad=overview.bad | failed.keys())
    skipped += overview.passed_over(selection)
    if selection is None:
        overview.require_nothing(folder, skipped)
        return None, skipped, overview
    return (
        _received(comm, Cast(selection, ranks, numbers, comm.sites), read, skipped),
        skipped,
        overview,
    )


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
    return [*claims.understood(told, claims.listing, "its checkpoints", comm.sites)]


def _read_by_all(
    comm: Comm, folder: Path, selection: Selection
) -> tuple[Read, dict[int, int], dict[tuple[int, Save, int], str]]:
    """Returns the states that this site read, the saving ranks of all read files, and failures."""
    save, read, failed = selection.save, Read(), dict[int, str]()
    for number in selection.read_by(comm.rank):
        try:
            read[number] = read_site(folder, save, number)
        except DamagedError as error:
            failed[number] = f"{comm.sites[comm.rank].called}: {error}"
    mine = {"failed": failed, "ranks": {number: state["rank"] for number, state in read.items()}}
    told = gathered(comm, mine)
    outcomes = claims.understood(
        told, claims.outcome_of(selection), "the files that it read", comm.sites
    )
    ranks = {number: then for _, found in outcomes for number, then in found.items()}
    if len({*ranks.values()}) < len(ranks):
        raise ValueError(f"Checkpoints: two files of {save} are of the same site")
    why = {(r, save, n): line for r, (bad, _) in enumerate(outcomes) for n, line in bad.items()}
    return read, ranks, why


def _received(comm: Comm, cast: Cast, read: Read, skipped: Sequence[str]) -> GoingOn:
    """Sends what this site has read to the sites that need it, and puts its own state together.

    Raises:
        ValueError: on all sites: a file or a message has not the content of a checkpoint.
    """
    letters: list[list[StateDict]] = [[] for _ in range(comm.world_size)]
    found, error, save = None, None, cast.selection.save
    try:
        letters = [cast.letters(read, rank) for rank in range(comm.world_size)]
    except Exception as raised:  # the content is unchecked
        error = raised
    own, letters[comm.rank] = letters[comm.rank], []
    came = swapped(comm, [packed(some) if some else b"" for some in letters])
    try:
        others = [letter for some in came if some for letter in unpacked(some)]
        found = _put_together(cast, [*own, *others], skipped)
    except Exception as raised:
        error = error or raised
    if error is not None:
        error = ValueError(f"Checkpoints: {save} is no checkpoint of ours: {error}")
    agree(comm, [f"read: {save}"], error)
    assert found is not None
    return found


def _put_together(cast: Cast, letters: Sequence[StateDict], skipped: Sequence[str]) -> GoingOn:
    """Puts the letters together; this site's own come first, and override all others."""
    mine = next((letter for letter in letters if "parts" in letter), None)
    if mine is None:
        raise ValueError("no site has sent this one's part")
    session, save = mine["session"], cast.selection.save
    if session is not None and not cast.same:
        sessions = {letter["rank"]: letter["session"] for letter in reversed(letters)}
        session = with_lost(sessions, save.sites)
    return GoingOn(save, cast.restored(skipped), mine["parts"], mine["random"], session)
