"""News of a site for people: what happens to its line, and to the other sites, by their names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outergrad.star.sentences import GOES_ON, LEFT, listed

_FIRST_S, _OFTEN_S, _SELDOM_S = 5.0, 10.0, 60.0
_SHORT_S = 1.0
"""Seconds for which a line may be down without a word."""

News = Iterator[tuple[int, str]]
"""Lines, each with its level of logging."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a site's line at one time.

    Attributes:
        at: time, seconds.
        names: of all sites, once the hub has answered.
        rank: of this site.
        is_ready: whether the run has begun.
        epoch: number of earlier runs that this one continues.
        away: sites that the hub waits for.
        gone: reasons why sites left or are lost.
        down_since: when the line went down, or when dialling began; None while it is up.
        obstacle: why it is down, if that is known.
        waits: when a wait for other sites began, and its limit, both in seconds; None without one.
    """

    at: float
    names: Sequence[str] = ()
    rank: int = 0
    is_ready: bool = False
    epoch: int = 0
    away: frozenset[int] = frozenset()
    gone: Mapping[int, str] = field(default_factory=dict)
    down_since: float | None = None
    obstacle: str = ""
    waits: tuple[float, float] | None = None

    @property
    def awaited(self) -> str:
        """Names of the sites that are not there; of all others if that is not known."""
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        ranks = sorted(self.away - {self.rank}) or others
        return listed([self.names[rank] for rank in ranks])

    def who_did_not_come(self, wait_s: float) -> str:
        """Says why a run has not begun after a wait."""
        if self.down_since is not None:
            why = self.obstacle or "it does not answer"
            return f"the hub is out of reach: {why}, for {wait_s:g} s"
        return f"the run has not begun: {self.awaited} did not come within {wait_s:g} s"


def news(site: str, hub: str, limit_s: float, before: Snapshot, now: Snapshot) -> News:
    """Yields lines about all that has changed between two snapshots.

    Args:
        site: name of this site.
        hub: address of the hub.
        limit_s: seconds that the hub may be out of reach.
        before: the earlier snapshot.
        now: the later one.
    """
    yield from _of_line(site, hub, limit_s, before, now)
    yield from _of_begin(site, before, now)
    yield from _of_others(before, now)
    yield from _of_wait(site, before, now)


def _of_line(site: str, hub: str, limit_s: float, before: Snapshot, now: Snapshot) -> News:
    if now.down_since is None:
        if before.down_since is not None and before.at - before.down_since > _SHORT_S:
            seconds = now.at - before.down_since
            level = logging.WARNING if before.names else logging.INFO
            yield level, f"{site}: the hub at {hub} is reached, after {seconds:.0f} s"
        return
    down_s = now.at - now.down_since
    is_new = _has_passed(before, now, _SHORT_S) or now.obstacle != before.obstacle
    if down_s > _SHORT_S and (is_new or _is_due(before.at - now.down_since, down_s)):
        why = now.obstacle or "it does not answer"
        told = f"{site}: the hub at {hub} is out of reach: {why}"
        yield logging.WARNING, f"{told}; dialled again, {down_s:.0f} of {limit_s:.0f} s"


def _has_passed(before: Snapshot, now: Snapshot, after_s: float) -> bool:
    since = now.down_since
    return since is not None and before.at - since <= after_s < now.at - since


def _of_begin(site: str, before: Snapshot, now: Snapshot) -> News:
    if not now.is_ready or before.is_ready:
        return
    if len(now.names) == 1:
        yield logging.WARNING, f"{site} trains alone: no other site takes part"
        return
    what = "goes on" if now.epoch else "begins"
    yield logging.INFO, f"{site}: the run {what}, of {listed([*now.names])}"


def _of_others(before: Snapshot, now: Snapshot) -> News:
    for rank in sorted(now.gone.keys() - before.gone.keys()):
        if rank < len(now.names):
            yield from _parting(now.names[rank], now.gone[rank])
    if now.names != before.names:
        return
    if now.is_ready and before.is_ready:
        for rank in sorted(now.away - before.away):
            yield logging.WARNING, f"{now.names[rank]} is away: the hub waits for its line"
    if now.is_ready == before.is_ready:
        for rank in sorted(before.away - now.away - now.gone.keys()):
            yield logging.INFO, f"{now.names[rank]} is {'back' if now.is_ready else 'there'}"


def _parting(name: str, why: str) -> News:
    if why == LEFT:
        yield logging.INFO, f"{name} has left"
    elif not why.startswith(GOES_ON):
        yield logging.WARNING, f"{name} is lost: {why}"


def _of_wait(site: str, before: Snapshot, now: Snapshot) -> News:
    if now.waits is None or now.is_ready or now.down_since is not None or not now.names:
        return
    since, limit_s = now.waits
    if _is_due(before.at - since, now.at - since):
        seconds = f"{now.at - since:.0f} of {limit_s:g} s"
        yield logging.WARNING, f"{site} is waiting for {now.awaited}, {seconds}"


def _is_due(before_s: float, now_s: float) -> bool:
    """True if a count is due between two times: at 5 s, every 10 s up to a minute, then each."""
    return _counts(before_s) < _counts(now_s)


def _counts(seconds: float) -> int:
    often = int(min(seconds, _SELDOM_S) / _OFTEN_S)
    return int(seconds >= _FIRST_S) + often + int(max(seconds - _SELDOM_S, 0.0) / _SELDOM_S)
