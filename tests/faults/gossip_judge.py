"""Whether a trial of gossip went as it must: every move has its opposite, and the rest train on."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from gossip_trials import STEPS, GossipTrial
from judge import Seen

_ROUNDING, _AGREED = 1e-10, 0.02
_OVER = ("its session has ended", "it is gone: it left")


@dataclass(frozen=True)
class GossipVerdict:
    """What came of a trial.

    Attributes:
        trial: it.
        injected: whether its fault came to pass.
        lost: rounds that counted at one end of an edge alone.
        complaints: what went wrong.
        has_begun: False where sites had given up before anything happened: the machine was busy.
    """

    trial: GossipTrial
    injected: bool
    lost: int
    complaints: Sequence[str]
    has_begun: bool = True


class _Site:
    """What a site has left: its files, and what it has told."""

    def __init__(self, trial: GossipTrial, rank: int, folder: Path, seen: Seen) -> None:
        self._about, self._folder, self.seen, self.rank = (
            f"{trial.number}-{rank}",
            folder,
            seen,
            rank,
        )
        self.start = self._read("start")
        raw = (folder / f"{self._about}.moves").read_bytes()
        size = 0 if self.start is None else 2 + len(self.start)
        rows = np.frombuffer(raw[: len(raw) // 8 // size * size * 8] if size else b"")
        self._rows = rows.reshape(-1, size) if size else rows.reshape(0, 2)

    def _read(self, what: str) -> np.ndarray | None:
        path = self._folder / f"{self._about}-{what}.npy"
        return np.load(path) if path.exists() else None

    @property
    def moves(self) -> dict[tuple[int, int], np.ndarray]:
        """Each move, by the neighbour and the number of the round."""
        return {(int(row[0]), int(row[1])): row[2:] for row in self._rows}

    @property
    def trained(self) -> np.ndarray | None:
        return self._read("trained")

    @property
    def averaged(self) -> np.ndarray | None:
        return self._read("averaged")

    def off_s(self) -> float:
        """How far the weights are from the start, the site's own steps and its moves."""
        told, own = self.seen.last("trained"), self._read("own")
        assert told is not None
        assert self.start is not None
        assert own is not None
        sums = self.start + own + self._rows[: told["settled"], 2:].sum(axis=0)
        return float(np.abs(self.trained - sums).max())


def judge_gossip(
    trial: GossipTrial, folder: Path, seen: Sequence[Seen], *, hung: bool
) -> GossipVerdict:
    """Judges a trial by what its sites have left."""
    sites = [_Site(trial, rank, folder, one) for rank, one in enumerate(seen)]
    injected = bool(seen[trial.victim].told("injected"))
    if not injected and not hung and not all(one.told("trained") for one in seen):
        return GossipVerdict(trial, injected, 0, (), has_begun=False)
    dead = {trial.victim} if injected and _is_gone(trial, seen[trial.victim]) else set[int]()
    lost, complaints = 0, ["a process was left"] if hung else []
    if not hung:
        complaints += _ends(trial, sites, injected=injected)
    if not complaints:
        lost, found = _opposites(trial, sites, injected=injected)
        complaints += found
        begun = trial.moment == "averaging" or seen[trial.victim].last("trained") is not None
        loses = injected and begun and trial.may_lose_a_letter
        told = [site.trained for site in sites if loses and site.trained is not None]
        moved = np.ptp(np.stack(told), axis=0).max() if told else 0.0
        complaints += _means([site for site in sites if site.rank not in dead], moved, loses=loses)
        complaints += _words(trial, sites, dead, injected=injected, late=begun)
    return GossipVerdict(trial, injected, lost, complaints)


def _is_gone(trial: GossipTrial, victim: Seen) -> bool:
    """Whether the others had to go on without the victim; a signal may have come too late."""
    if trial.kind != "stop" or trial.moment != "any":
        return trial.is_lethal
    told = victim.last("averaged") or {"closed": {}}
    return any("was away for longer" in why for why in told["closed"].values())


def _ends(trial: GossipTrial, sites: Sequence[_Site], *, injected: bool) -> Iterator[str]:
    for site in sites:
        last = site.seen.last("ended")
        if site.rank == trial.victim and injected and trial.kind == "kill":
            if site.seen.status != -signal.SIGKILL:
                yield f"site {site.rank}, which was killed, ended with {site.seen.status}"
            continue
        if site.seen.status != 0 or last is None or last["error"] != "done":
            yield f"site {site.rank} ended with {site.seen.status}: {last}"
            continue
        told = site.seen.last("trained")
        losses = [] if told is None else told["losses"]
        if len(losses) != STEPS or not np.isfinite(losses).all():
            yield f"site {site.rank} has not trained on: {losses}"
        elif site.off_s() > _ROUNDING:
            yield f"site {site.rank} is {site.off_s()} from its own steps and moves"


def _opposites(
    trial: GossipTrial, sites: Sequence[_Site], *, injected: bool
) -> tuple[int, list[str]]:
    """Compares the moves at both ends of each edge; returns how many had no opposite."""
    lost, complaints = 0, list[str]()
    for one, other in combinations(sites, 2):
        here = {number: m for (rank, number), m in one.moves.items() if rank == other.rank}
        there = {number: m for (rank, number), m in other.moves.items() if rank == one.rank}
        pair = f"sites {one.rank} and {other.rank}"
        for number in here.keys() & there.keys():
            off = np.abs(here[number] + there[number]).max()
            if off > _ROUNDING:
                complaints.append(f"{pair} are off by {off} in round {number}")
        alone = here.keys() ^ there.keys()
        lost += len(alone)
        touched = injected and trial.victim in (one.rank, other.rank)
        allowed = 1 if touched and trial.may_lose_a_letter else 0
        if len(alone) > allowed:
            complaints.append(f"{pair} do not have both of the rounds {sorted(alone)}")
    return lost, complaints


def _means(left: Sequence[_Site], moved: float, *, loses: bool) -> Iterator[str]:
    """The average by rounds keeps the mean of those that are left and reach each other.

    Args:
        left: sites that are left.
        moved: how far moves without an opposite, or with the victim, may have moved their mean.
        loses: whether the victim took part in the average, and a letter of its may be lost.
    """
    for reached in _parts(left):
        before = np.stack([site.trained for site in reached])
        after = np.stack([site.averaged for site in reached])
        spread = np.abs(before - before.mean(0)).max()
        apart = np.abs(after - after.mean(0)).max()
        shifted = np.abs(after.mean(0) - before.mean(0)).max()
        names = [site.rank for site in reached]
        if shifted > moved + _ROUNDING:
            yield f"the average of {names} has moved their mean by {shifted}"
        if apart > _AGREED * spread + _ROUNDING and not loses:
            yield f"after the average {names} are {apart} apart, before {spread}"


def _parts(left: Sequence[_Site]) -> list[list[_Site]]:
    """Groups of sites that reach each other by edges that are open at both ends."""
    ends = {(site.rank, int(n)) for site in left for n in site.seen.last("averaged")["free"]}  # type: ignore[index]
    closed = {
        (site.rank, int(n))
        for site in left
        for n, why in site.seen.last("averaged")["closed"].items()  # type: ignore[index]
        if why and not why.startswith(_OVER)
    }
    parts = [{site.rank} for site in left]
    for i, j in ends:
        if (j, i) in ends and not {(i, j), (j, i)} & closed:
            joined = [part for part in parts if {i, j} & part]
            parts = [part for part in parts if part not in joined] + [set().union(*joined)]
    return [[site for site in left if site.rank in part] for part in parts]


def _words(
    trial: GossipTrial, sites: Sequence[_Site], dead: set[int], *, injected: bool, late: bool
) -> Iterator[str]:
    """Nobody but the victim is left out, and why is known unless it was too late for that."""
    if not injected:
        return
    why = {
        site.rank: (site.seen.last("averaged") or {"closed": {}})["closed"].get(str(trial.victim))
        for site in sites
        if site.rank not in {trial.victim, *dead}
    }
    if trial.kind == "damage" and not any(
        (one or "").startswith("its message") for one in why.values()
    ):
        yield f"nobody has found the damaged letter: {why}"
    for rank in why if dead and not late else ():
        if why[rank] == "":
            yield f"site {rank} has not noticed that site {trial.victim} is gone"
    for site in sites:
        told = site.seen.last("averaged")
        if site.rank in {trial.victim, *dead} or told is None:
            continue
        for n, reason in told["closed"].items():
            if int(n) != trial.victim and reason and not reason.startswith(_OVER):
                yield f"site {site.rank} has left out site {n}, which is well: {reason}"


def summary(verdicts: Sequence[GossipVerdict]) -> Iterator[str]:
    """A table of faults, and what they were."""
    yield "| fault | over gloo | around a hub | rounds that counted at one end |"
    yield "|---|---|---|---|"
    for kind in sorted({verdict.trial.kind for verdict in verdicts}):
        found = [v for v in verdicts if v.trial.kind == kind and v.injected]
        gloo = sum(v.trial.way == "gloo" for v in found)
        yield f"| {kind} | {gloo} | {len(found) - gloo} | {sum(v.lost for v in found)} |"
    wrong = sum(bool(verdict.complaints) for verdict in verdicts)
    injected = sum(verdict.injected for verdict in verdicts)
    yield f"{injected} faults in {len(verdicts)} trials, {wrong} of which went wrong"
    if busy := sum(not verdict.has_begun for verdict in verdicts):
        yield f"{busy} trials have not begun: the machine was busy"
