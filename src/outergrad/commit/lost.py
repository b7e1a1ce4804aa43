"""Findings after a loss: which sites are lost, where, and whether the step still counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from outergrad.comm.failure_report import FailureReport, LastStep
from outergrad.core.errors import ExchangeError, Failure, SiteLostError
from outergrad.core.sites import Site, called
from outergrad.core.transport import Comm, MeshRanks

Named = Callable[[Sequence[int]], str]
"""Formats sites, or ranks of a mesh, as words."""
_SOON_S = 2.0
FAREWELL_S = 0.25
"""Seconds for a site with a closed connection to say why: Python ends after it closed."""


@dataclass(frozen=True)
class Findings:
    """Findings of a site that has lost others.

    Attributes:
        lost: the lost sites.
        counted: whether the step counts all the same: some site has made it.
        certain: whether it is known that no site has applied the step.
        may_differ: as in `SiteLostError`.
        lacking: sites of `may_differ` that reported fewer steps than this site's, and make no more.
        awaited_by: sites that waited for this one in vain.
        told: reasons for leaving that sites reported.
        doubt: reason why it cannot be known whether the step counts elsewhere, if so.
    """

    lost: tuple[int, ...]
    counted: bool = False
    certain: bool = True
    may_differ: tuple[int, ...] = ()
    lacking: tuple[int, ...] = ()
    awaited_by: tuple[int, ...] = ()
    told: Mapping[int, str] = field(default_factory=dict)
    doubt: str = ""


def find_out(comm: Comm, standing: FailureReport) -> Findings:
    """Aborts together with the other sites that are left.

    If no site can have applied the step, this waits only to learn which sites are lost. Otherwise
    it waits until every site that may live has reported, for as long as messages may take.
    """
    began = time.monotonic()

    def enough(texts: Sequence[str | None]) -> bool:
        return is_enough(standing, texts, time.monotonic() - began)

    patience_s = patience_for(standing, comm.patience_s)
    final = replace(standing, settled=True).text()
    texts = comm.give_up(standing.text(), final, enough, patience_s, standing.session)
    return conclude(standing, texts, comm.rank, comm.world_size, comm.host)


def patience_for(standing: FailureReport, message_s: float) -> float:
    """Returns how many seconds to wait for reports, where a message may take `message_s`."""
    return message_s if standing.voted else min(_SOON_S, message_s)


def is_enough(standing: FailureReport, texts: Sequence[str | None], waited_s: float) -> bool:
    """True if a site that aborted need not wait for more reports.

    Args:
        standing: its own report.
        texts: reports of every site so far; None for sites without one.
        waited_s: seconds that it has waited for them.
    """
    found = _readable(texts)
    missing = {site for site, text in enumerate(texts) if text is None}
    gone = {site for one in found.values() for site in one.gone}
    asked = gone if standing.voted else gone.union(*(one.silent for one in found.values()))
    return missing <= asked and not (missing & gone and waited_s < FAREWELL_S)


def conclude(
    standing: FailureReport,
    texts: Sequence[str | None] | None,
    rank: int,
    sites: int,
    host: int | None,
) -> Findings:
    """Returns the findings of one site from all reports.

    Args:
        standing: its own report.
        texts: reports of every site; None if the store is gone.
        rank: rank of this site.
        sites: number of sites.
        host: site with which the store ends, if any.
    """
    if texts is None:
        return _alone(standing, rank, sites, host)
    return _found(rank, standing, texts)


def _readable(texts: Sequence[str | None]) -> dict[int, FailureReport]:
    read = {site: FailureReport.of(text) for site, text in enumerate(texts) if text is not None}
    return {site: standing for site, standing in read.items() if standing is not None}


def _found(rank: int, standing: FailureReport, texts: Sequence[str | None]) -> Findings:
    found = {**_readable(texts), rank: standing}
    missing = {site for site, text in enumerate(texts) if text is None}
    others = {site: one for site, one in found.items() if site != rank}
    ends = {site: end for site, one in others.items() if (end := one.ends.get(standing.session))}
    later = [end for end in ends.values() if end.steps > standing.step]
    counted = standing.voted and any(end.counted for end in later)
    unheard = set(range(len(texts))) - ends.keys() - {rank} if standing.session else missing
    own = {**standing.ends, standing.session: LastStep(standing.step + counted)}
    behind = {site for site, one in others.items() if _stays_behind(one, own)}
    return Findings(
        lost=lost_of(rank, found, missing),
        counted=counted,
        certain=not standing.voted or bool(later) or not unheard,
        may_differ=tuple(sorted(unheard | behind)),
        lacking=tuple(sorted(behind)),
        awaited_by=awaited_by(rank, found),
        told=told_by(others),
    )


def _stays_behind(other: FailureReport, own: Mapping[int, LastStep]) -> bool:
    """True if a site has made fewer steps of any session, and will not learn of more.

    A site that has not voted on the step accepts from nobody that it counts.
    """
    fewer = any(end.steps < own[one].steps for one, end in other.ends.items() if one in own)
    return fewer and (other.settled or bool(other.ended) or not other.voted)


def lost_of(rank: int, found: Mapping[int, FailureReport], missing: set[int]) -> tuple[int, ...]:
    """Returns the sites that left no report, came too late, or aborted because of their own error.

    If all have reported and none has waited in vain, only a connection is lost.
    """
    suspects = {site for one in found.values() for site in (*one.silent, *one.gone)}
    left = missing | {site for site, one in found.items() if one.ended}
    late = _late(found)
    erred = {site for site, one in found.items() if one.why}
    timed_out = _timed_out(found)
    in_vain = timed_out - {rank} if rank in late else set[int]()
    who = left & suspects or left or late - {rank} or erred - {rank} or in_vain
    return tuple(sorted(who))


def awaited_by(rank: int, found: Mapping[int, FailureReport]) -> tuple[int, ...]:
    """Returns the sites that have waited for a site in vain."""
    told = tuple(site for site, one in found.items() if rank in one.silent)
    if told or rank not in _late(found):
        return told
    return tuple(sorted(_timed_out(found) - {rank}))


def _timed_out(found: Mapping[int, FailureReport]) -> set[int]:
    return {site for site, one in found.items() if one.timed_out}


def _late(found: Mapping[int, FailureReport]) -> set[int]:
    late = late_sites({site: one.silent for site, one in found.items()})
    return late if late or not _timed_out(found) else _late_in_sum(found)


def _late_in_sum(found: Mapping[int, FailureReport]) -> set[int]:
    """Returns the site that is late in an all-reduce, where nobody knows for whom it waits.

    A late site has not sent its part, and has not waited until the timeout itself. If it was
    suspended in the send, it has not waited for long when the others abort. One that got the late
    part an instant before waits no more, but it has waited in this step.
    """
    least, longest_s = min(o.made for o in found.values()), max(o.waited_s for o in found.values())
    level = {site: one for site, one in found.items() if one.made == least}
    unsent = [site for site, one in level.items() if not (one.sent or one.timed_out)]
    still = [site for site, one in level.items() if one.waited_s < longest_s / 2]
    late = [site for site in unsent if site in still]  # one that waits for votes has not sent, too
    order = sorted(late or still or unsent, key=lambda site: found[site].waited_s)
    if not late and len(order) > 1 and 2 * found[order[0]].waited_s > found[order[1]].waited_s:
        return set()  # several have waited about as long: any name would be a guess
    return set(order[:1])


def late_sites(silent: Mapping[int, Sequence[int]]) -> set[int]:
    """Returns the sites for which others have waited in vain.

    A site that was suspended finds all the others late when it resumes. If somebody has waited for
    it, too, its own report counts only if there is no other.

    Args:
        silent: for each site, the sites that it has waited for.
    """
    late = {site for sites in silent.values() for site in sites}
    told = {site for one, sites in silent.items() if one not in late for site in sites}
    return told or late


def told_by(words: Mapping[int, FailureReport]) -> dict[int, str]:
    """Returns the reasons for leaving that sites reported."""
    return {site: told for site, one in words.items() if (told := _told(one))}


def _told(one: FailureReport) -> str:
    if one.ended == "session":
        return f"its session had ended, after {_steps(one)}"
    return f"it {'ended with' if one.ended else 'gave up because of'} {one.why}" * bool(one.why)


def _steps(one: FailureReport) -> str:
    steps = one.ends[one.session].steps if one.session in one.ends else one.step
    return f"{steps} step{'s' * (steps != 1)}"


def _alone(standing: FailureReport, rank: int, sites: int, host: int | None) -> Findings:
    """Returns findings without the store, which is usually gone with the site that holds it.

    A closed connection tells nothing then: a site that aborts closes its connections, too.
    """
    suspects = tuple(sorted({*standing.gone, *standing.silent}))
    return Findings(
        lost=suspects if host in (None, rank) else (host,),
        certain=not standing.voted,
        may_differ=tuple(site for site in range(sites) if site != rank),
        doubt="the store of the group is gone",
    )


def find_out_in_mesh(mesh: MeshRanks, standing: FailureReport, message_s: float) -> Findings:
    """Aborts together with the other ranks of a mesh; sites here are ranks, by their numbers.

    A rank that aborts accepts from nobody that the step counts, because it lacks the shares of the
    others. So its report is final.
    """
    began = time.monotonic()

    def enough(texts: Sequence[str | None]) -> bool:
        return is_enough(standing, texts, time.monotonic() - began)

    final, patience_s = replace(standing, settled=True).text(), patience_for(standing, message_s)
    texts = mesh.give_up(standing.text(), final, enough, patience_s, standing.session)
    if texts is None:
        found = _alone(standing, mesh.number, mesh.total, mesh.host)
        return found if mesh.has_place else replace(found, doubt="the ranks share no store")
    return found_in_mesh(mesh, standing, texts)


def found_in_mesh(
    mesh: MeshRanks, standing: FailureReport, texts: Sequence[str | None]
) -> Findings:
    """Returns the findings from the reports of a mesh's ranks."""
    found = {**_readable(texts), mesh.number: standing}
    others = {number: one for number, one in found.items() if number != mesh.number}
    unknown = set(range(mesh.total)) - found.keys()
    if standing.step and standing.session:
        heard = {n for n, one in others.items() if standing.session in one.ends}
        unknown |= set(mesh.peers) - heard - {mesh.number}
    own = {**standing.ends, standing.session: LastStep(standing.step)}
    apart = {n: _steps_apart(one.ends, own) for n, one in others.items()}
    ahead = {n for n, steps in apart.items() if steps > 0}
    lacking = {n for n, steps in apart.items() if steps < 0}
    return Findings(
        lost=lost_of(mesh.number, found, set(range(mesh.total)) - found.keys()),
        certain=not ahead and not (standing.voted and unknown),
        may_differ=tuple(sorted(unknown | ahead | lacking)),
        lacking=tuple(sorted(lacking)),
        awaited_by=awaited_by(mesh.number, found),
        told=told_by(others),
    )


def _steps_apart(ends: Mapping[int, LastStep], own: Mapping[int, LastStep]) -> int:
    """Returns by how many steps another rank is ahead, in the session that differs most."""
    steps = [end.steps - own[one].steps for one, end in ends.items() if one in own]
    return max(steps, key=abs, default=0)


def standing_of(
    error: ExchangeError,
    step: int,
    session: int = 0,
    ends: Mapping[int, LastStep] | None = None,
    mesh: MeshRanks | None = None,
) -> FailureReport:
    """Returns the report of this site when its transport failed, before any vote."""
    closed, late = error.kind == Failure.CLOSED, error.kind == Failure.TIMEOUT
    sites = error.sites if mesh is None else error.ranks or mesh.numbers_of(error.sites)
    return FailureReport(
        step,
        session,
        silent=() if closed else sites,
        gone=sites if closed else (),
        waited_s=error.waited_s,
        ends=dict(ends or {}),
        why="" if closed or late or sites else str(error),
        timed_out=late,
    )


def lost_error(
    comm: Comm, step: int, place: str, error: Exception, findings: Findings
) -> SiteLostError:
    """Returns the error for the user; with a mesh the findings are of ranks, by their numbers."""
    mesh = comm.mesh
    told = partial(named, comm.sites) if mesh is None else partial(_named_ranks, mesh)
    own = told([comm.rank if mesh is None else mesh.number])
    ranks = [] if mesh is None else [mesh.place_of(number) for number in findings.lost]
    lost, may_differ = findings.lost, findings.may_differ
    if mesh is not None:
        lost, may_differ = (_sites_of(mesh, numbers) for numbers in (lost, may_differ))
    all_live = f"a connection, while all {'sites' if mesh is None else 'ranks'} live,"
    who = told(findings.lost) if findings.lost or findings.doubt else all_live
    return SiteLostError(
        f"{own} lost {who} in step {step}, while it waited for {place}: "
        f"{_why(error, findings, told)}. {_how_far(step, findings, told)}. The connections "
        f"cannot be used any more: start the processes again from the last checkpoint",
        lost,
        step,
        place,
        certain=findings.certain and not findings.lacking,
        may_differ=may_differ,
        ranks=ranks,
    )


def _sites_of(mesh: MeshRanks, numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({mesh.place_of(number)[0] for number in numbers}))


def _named_ranks(mesh: MeshRanks, numbers: Sequence[int]) -> str:
    places = [mesh.place_of(number) for number in numbers]
    told = (f"local rank {k} of {Site(site).called}" for site, k in places)
    return ", ".join(told) or "the others"


def _why(error: Exception, findings: Findings, named: Named) -> str:
    why = str(error)
    if findings.awaited_by:
        why = f"{named(findings.awaited_by)} waited for this one until the timeout, and gave up"
    told = (f"; {named([site])} left word that {said}" for site, said in findings.told.items())
    return "".join([why, *told])


def _how_far(step: int, findings: Findings, named: Named) -> str:
    """Says whether the step counts anywhere, and which sites may have made other steps."""
    some, doubt = named(findings.may_differ), f"; {findings.doubt}" * bool(findings.doubt)
    if not findings.certain:
        return (
            f"Step {step} was not applied here, but {some} may have applied it{doubt}: compare the "
            f"sites before you go on from this state"
        )
    applied = f"Step {step} was not applied on any site"
    if findings.lacking:
        return (
            f"{applied}, but this site has made a step before it that {named(findings.lacking)} "
            f"gave up: compare the sites before you go on from this state"
        )
    if not findings.may_differ:
        return f"{applied}, and all have made the same steps before it"
    return f"{applied}; how far {some} came before it is not known{doubt}"


def named(sites: Sequence[Site], ranks: Sequence[int]) -> str:
    """Formats some of the sites as words."""
    return called([sites[rank] for rank in ranks])
