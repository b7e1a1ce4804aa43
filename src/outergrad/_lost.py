"""What is left when a site is lost: who it was, where, and whether the step still counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from outergrad._protocols import Comm
from outergrad._types import ExchangeError

_SOON_S = 2.0
_USUAL_HOST = 0
"""Of the store: torchrun and `env://` have the first site hold it."""


class SiteLostError(RuntimeError):
    """Another site died, hangs or is cut off. No site that is left has applied the step.

    (That some may have is said where it cannot be known: docs/faults.md, Votes.)

    Attributes:
        sites: which are lost, as far as this site can tell.
        step: synchronised steps before the one in which it was noticed.
        place: what this site waited for: a layer's gradients, or what comes before and after them.
    """

    def __init__(self, message: str, sites: Sequence[int], step: int, place: str) -> None:
        super().__init__(message)
        self.sites, self.step, self.place = tuple(sites), step, place

    def again(self) -> SiteLostError:
        """Another one that says the same: what was raised holds on to what was going on."""
        return SiteLostError(str(self), self.sites, self.step, self.place)


@dataclass(frozen=True)
class Standing:
    """How far a site has come; what it leaves for the others.

    Attributes:
        step: synchronised steps before its last one.
        voted: whether it said of that one that it may count.
        counted: whether it knows that it does: all sites said so.
        silent: sites that it waited for in vain.
        gone: those whose connections were closed: who closes them leaves word before.
        waited_s: how long it had waited when it gave up: the one that is late has not.
    """

    step: int
    voted: bool = False
    counted: bool = False
    silent: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    waited_s: float = 0.0

    @staticmethod
    def of(text: str) -> Standing:
        """As it was left."""
        found = json.loads(text)
        pairs = {name: tuple(found[name]) for name in ("silent", "gone")}
        return Standing(**{**found, **pairs})

    @property
    def steps(self) -> int:
        """How many have been applied there."""
        return self.step + self.counted


@dataclass(frozen=True)
class Findings:
    """What a site finds when it has lost others.

    Attributes:
        lost: these.
        counted: whether the step counts all the same: some site had all votes.
        awaited_by: sites that waited for this one in vain.
        doubt: why other sites may have applied the step although this one has not, if they may.
    """

    lost: tuple[int, ...]
    counted: bool
    awaited_by: tuple[int, ...] = ()
    doubt: str = ""


def find_out(comm: Comm, standing: Standing) -> Findings:
    """Gives up together with the other sites that are left.

    Where nobody can have applied the step, this waits only to learn who is lost; otherwise until
    every site that may live has said how far it is, for as long as messages may take.
    """

    def enough(texts: Sequence[str | None]) -> bool:
        found = [Standing.of(text) for text in texts if text is not None]
        missing = {site for site, text in enumerate(texts) if text is None}
        gone = {site for one in found for site in one.gone}
        suspects = gone | {site for one in found for site in one.silent}
        return missing <= (gone if standing.voted else suspects)

    patience_s = comm.patience_s if standing.voted else min(_SOON_S, comm.patience_s)
    texts = comm.give_up(json.dumps(asdict(standing)), enough, patience_s)
    suspects = set(standing.gone) | set(standing.silent)
    if texts is None:
        return _alone(comm, standing, suspects)
    found = {site: Standing.of(text) for site, text in enumerate(texts) if text is not None}
    missing = tuple(site for site in range(comm.world_size) if site not in found)
    counted = any(other.steps > standing.step for other in found.values())
    awaited_by = tuple(site for site, other in found.items() if comm.rank in other.silent)
    lost = missing or _late(comm.rank, found) or tuple(sorted(suspects))
    return Findings(lost, standing.voted and counted, awaited_by)


def _late(rank: int, found: Mapping[int, Standing]) -> tuple[int, ...]:
    """Who came too late, where all have left word: for whom others waited in vain.

    In an all-reduce nobody knows for whom; then it is who has waited least.
    """
    late = {site for other in found.values() for site in other.silent} - {rank}
    if not late:
        soonest = min(found, key=lambda site: found[site].waited_s)
        late = {soonest} - {rank}
    return tuple(sorted(late))


def _alone(comm: Comm, standing: Standing, suspects: set[int]) -> Findings:
    """What there is to find without the store: it is usually gone with site 0, which holds it.

    Whose connection was closed tells nothing then: that of a site that gave up is closed, too.
    """
    lost = (_USUAL_HOST,) if comm.rank != _USUAL_HOST else tuple(sorted(suspects))
    doubt = "the store of the group is gone, too" if standing.voted else ""
    return Findings(lost, counted=False, doubt=doubt)


def standing_of(error: ExchangeError, step: int, *, voted: bool) -> Standing:
    """How far this site has come when its transport failed."""
    closed = "closed" in str(error)
    return Standing(
        step,
        voted,
        silent=() if closed else error.sites,
        gone=error.sites if closed else (),
        waited_s=error.waited_s,
    )


def lost_error(
    rank: int, step: int, place: str, error: Exception, findings: Findings
) -> SiteLostError:
    """What the user is told."""
    why = str(error)
    if findings.awaited_by:
        why = f"{_named(findings.awaited_by)} waited for this one until the timeout, and gave up"
    where = "on any site that is left"
    if findings.doubt:
        where = f"here; {findings.doubt}, so another site may have applied it"
    return SiteLostError(
        f"site {rank} lost {_named(findings.lost)} in step {step}, while it waited for {place}: "
        f"{why}. Step {step} was not applied {where}. The process group cannot be used any "
        f"more: start the processes again from the last checkpoint",
        findings.lost,
        step,
        place,
    )


def _named(sites: Sequence[int]) -> str:
    if not sites:
        return "the others"
    return f"site {sites[0]}" if len(sites) == 1 else f"sites {', '.join(map(str, sites))}"
