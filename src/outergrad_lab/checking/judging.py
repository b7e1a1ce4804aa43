"""Verdicts on executions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from outergrad_lab.checking.site import Ending
from outergrad_lab.checking.trial import Trial

_CALLS_S = 12.0
"""Seconds for calls of the store, of which each may take two."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on an execution.

    Attributes:
        wrong: failures, each with its kind in front of a colon.
        doubted: whether remaining sites differ; a difference that they do not report is wrong, too.
        needless: whether a site reported a possible difference though none differs.
        lost: whether some site lost another.
    """

    wrong: tuple[str, ...] = ()
    doubted: bool = False
    needless: bool = False
    lost: bool = False


def judge(trial: Trial, endings: Sequence[Ending], broken: Sequence[str] = ()) -> Verdict:
    """Compares how the sites ended with what is allowed.

    Args:
        trial: settings and faults of the execution.
        endings: reports of all sites, by name.
        broken: promises that were broken when sites went on without others, or with more.
    """
    left = {name: one for name, one in enumerate(endings) if one.done or one.lost is not None}
    wrong = [
        f"wrong step: site {name} {what}" for name, one in enumerate(endings) for what in one.wrong
    ]
    wrong += [f"hang: site {name} never ended" for name in _hanging(trial, endings)]
    wrong += [
        f"hang: site {name} spent {one.longest_s:.1f} s in one step"
        for name, one in left.items()
        if one.longest_s > _bound_s(trial)
    ]
    unsaid, is_apart = list[str](), False
    for epoch in range(1 + max((one.epoch for one in endings), default=0)):
        pairs = permutations(_ends_of(endings, epoch).items(), 2)
        behind = [(i, j) for (i, one), (j, two) in pairs if one.applied < two.applied]
        of_epoch = _ends_of(endings, epoch)
        told = [_unsaid(of_epoch, *pair) for pair in behind]
        unsaid += [one for one in told if one]
        wrong += [told for pair in behind if (told := _withheld(trial, of_epoch, *pair))]
        is_apart = is_apart or bool(behind)
    done = {one.history for one in endings if one.done}
    if len(done) > 1:
        wrong.append(f"apart: sites have ended with {done}")
    lost = any(one.lost is not None for one in left.values())
    doubts = any(not one.certain for one in left.values())
    if trial.min_sites is None:  # else a hub says who is gone
        wrong += [f"uncompared: {told}" for told in _uncompared(trial, left)]
        unsaid += [f"name: {told}" for told in _misnamed(trial, left)]
    return Verdict(
        tuple(wrong) + tuple(broken) + tuple(unsaid), is_apart, doubts and not is_apart, lost
    )


def _ends_of(endings: Sequence[Ending], epoch: int) -> dict[int, Ending]:
    """Returns how sites ended in a membership, by rank; those that went on have left the others."""
    found, everybody = dict[int, Ending](), tuple(range(len(endings)))
    for name, one in enumerate(endings):
        rank = one.ranks.get(epoch, name)
        if one.epoch == epoch and (one.done or one.lost is not None):
            found[rank] = one
        elif epoch in one.left_after:
            gone_on = Ending(one.left_after[epoch], lost=(), certain=False, may_differ=everybody)
            found[rank] = gone_on
    return found


def _hanging(trial: Trial, endings: Sequence[Ending]) -> list[int]:
    ends = [one.done or one.lost is not None or one.left for one in endings]
    killed = {fault.site for fault in trial.faults if fault.kind == "kill"}
    return [rank for rank, end in enumerate(ends) if not end and rank not in killed]


def _bound_s(trial: Trial) -> float:
    """Longest seconds of a step, without computing: every message may be late by T."""
    sites, times = trial.sites + len(trial.comes), 1 if trial.min_sites is None else 3
    return times * ((2 * sites + 2) * trial.timeout_s + _CALLS_S)


def _unsaid(left: dict[int, Ending], behind: int, ahead: int) -> str:
    """Describes two sites that differ, unless they report it as they must; else empty."""
    one, other = left[behind], left[ahead]
    told = f"site {behind} {one}; site {ahead} {other}"
    if other.applied - one.applied > 1:
        return f"far apart: {told}"
    if one.lost is None or one.certain or ahead not in one.may_differ:
        return f"silent: {told}"
    agrees = other.lost is not None and behind not in other.may_differ
    return f"half said: {told}" if agrees else ""


def _withheld(trial: Trial, left: dict[int, Ending], behind: int, ahead: int) -> str:
    """Describes a site that kept a step for itself; empty if it could not help it."""
    one, other = left[behind], left[ahead]
    told = f"site {behind} {one}; site {ahead} {other}"
    if other.done and other.compared:
        return f"unsettled: {told}"
    hit = {f.site for f in trial.faults if f.kind in _STILL} | {site for site, _ in trial.busy}
    hit |= {site for f in trial.faults if f.kind == "cut line" for site in (f.site, f.other)}
    is_quiet = not any("store" in f.kind for f in trial.faults) and trial.host not in hit
    is_first = one.epoch == other.epoch == 0 and not {behind, ahead} & hit
    return f"withheld: {told}" if is_quiet and is_first and other.lost is not None else ""


def _misnamed(trial: Trial, left: dict[int, Ending]) -> list[str]:
    """Errors that blame sites without a fault; none if the store failed: then no site can know."""
    if any("store" in f.kind or f.site == trial.host for f in trial.faults):
        return []
    ends = {one for f in trial.faults for one in (f.site, f.other) if f.kind in _ENDS}
    blamed = {f.site for f in trial.faults} | {site for site, _ in trial.busy} | ends
    blamed |= {rank for rank, one in left.items() if one.done}
    return [
        f"site {rank} {one}"
        for rank, one in left.items()
        if one.lost is not None and rank not in blamed and not set(one.lost) <= blamed
        if not _are_both_ahead(trial, left, one.lost)
    ]


def _are_both_ahead(trial: Trial, left: dict[int, Ending], named: tuple[int, ...]) -> bool:
    """True if nobody can tell the one site that is named from one that stood still in a sum.

    That one stood still for T or longer, and then sent its part to the other. Both have made the
    step and are in the next one when a third gives up.
    """
    still = {f.site for f in trial.faults if f.kind == "pause" and f.for_s >= trial.timeout_s}
    if not trial.sums or len(named) != 1 or named[0] not in left:
        return False
    made = left[named[0]].applied
    return made > 0 and any(site in left and left[site].applied == made for site in still)


def _uncompared(trial: Trial, left: dict[int, Ending]) -> list[str]:
    """Sites that ended without having compared, though nothing happened to the store."""
    hit = {f.site for f in trial.faults if f.kind in _STILL}
    hit |= {site for f in trial.faults if f.kind == "cut line" for site in (f.site, f.other)}
    if any("store" in f.kind for f in trial.faults) or trial.host in hit:
        return []
    ended = [(rank, one) for rank, one in left.items() if one.done and rank not in hit]
    return [f"site {rank} {one}" for rank, one in ended if not one.compared]


_STILL = ("kill", "leave", "pause", "cut site")


_ENDS = ("reset", "cut line", "cut site", "damage")
