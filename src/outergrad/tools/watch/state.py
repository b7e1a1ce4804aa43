"""State of a run: each site's last events, and recent series."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outergrad.events import Change, End, Event, Layer, Mishap, Run, Scalars, Step, Trial

RECENT = 1024
PATIENCE_S = 10.0
UNUSUAL = 3
_SMOOTHED_STEPS = 8
_MISHAPS = 100


class Series(dict[int, float]):
    """Last `RECENT` values by step, oldest first."""

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step; replaces an earlier value of that step."""
        self[step] = value
        if len(self) > RECENT:
            del self[next(iter(self))]

    def forget_from(self, step: int) -> None:
        """Drops the values of this step and later ones."""
        for late in [at for at in self if at >= step]:
            del self[late]


@dataclass
class SiteLayer:
    """One layer at one site.

    Attributes:
        last: its last event.
        sent_bytes: sum over all its events.
        effective_rank: values of recent steps.
    """

    last: Layer
    sent_bytes: int = 0
    effective_rank: Series = field(default_factory=Series)

    def take(self, event: Layer) -> None:
        """Adds an event of the layer."""
        self.last, self.sent_bytes = event, self.sent_bytes + event.sent_bytes
        if event.effective_rank is not None:
            self.effective_rank.add(event.step, event.effective_rank)


class WatchedSite:
    """State of one site in the present run.

    Attributes:
        rank: rank of the site.
        run: its last start or resumption; None if that was never written.
        layers: layers by name.
        steps: its last steps.
        mishaps: its last failed steps.
        trial: last trial of `og.Auto()`; None before one.
        change: last change of the participating sites; None before one.
        scalars: series by name, in the order of their first event.
        ended: event of its end; None while it goes on.
        agreement: cosine between its own gradient and the mean one, over all layers.
        step: last step of any event.
        time: time of the last event by its own clock; seconds since 1970.
        heard: time of the last write to its file; seconds since 1970.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.heard = rank, 0.0
        self._start_afresh(None)

    def _start_afresh(self, run: Run | None) -> None:
        self.run = run
        self.layers: dict[str, SiteLayer] = {}
        self.steps: deque[Step] = deque(maxlen=_SMOOTHED_STEPS)
        self.mishaps: deque[Mishap] = deque(maxlen=_MISHAPS)
        self.trial: Trial | None = None
        self.change: Change | None = None
        self.scalars: dict[str, Series] = defaultdict(Series)
        self.agreement = Series()
        self.ended: End | None = None
        self.step, self.time = 0, 0.0
        self._gaps_s: deque[float] = deque(maxlen=RECENT)

    def take(self, event: Event, heard: float) -> None:
        """Adds the next event of its file."""
        self.heard = heard
        if isinstance(event, Run):
            return self._begin(event)
        if isinstance(event, Layer):
            return self.layers.setdefault(event.layer, SiteLayer(event)).take(event)
        if self.time and event.time > self.time:
            self._gaps_s.append(event.time - self.time)
        self.step, self.time = max(self.step, event.step), max(self.time, event.time)
        match event:
            case Scalars():
                for name, value in event.values.items():
                    self.scalars[name].add(event.step, value)
            case Mishap():
                self.mishaps.append(event)
            case Trial():
                self.trial = event
            case Change():
                self.change = event
            case End():
                self.ended = event
            case Step():
                self._take_step(event)

    def _begin(self, run: Run) -> None:
        if run.step == 0:
            self._start_afresh(run)
        for series in self.scalars.values():
            series.forget_from(run.step + 1)
        for series in (self.agreement, *(at.effective_rank for at in self.layers.values())):
            series.forget_from(run.step)
        self.steps.clear()
        self._gaps_s.clear()
        self.ended, self.run, self.step, self.time = None, run, run.step, run.time

    def _take_step(self, step: Step) -> None:
        self.steps.append(step)
        layers = [layer.last for layer in self.layers.values() if layer.last.step == step.step]
        if (cosine := whole_cosine(layers)) is not None:
            self.agreement.add(step.step, cosine)

    def silence_s(self, now: float) -> float | None:
        """Seconds without news, or None if that is not unusual or the site has ended."""
        if self.ended is not None:
            return None
        silence = now - self.heard
        usual = max(self._gaps_s, default=0.0)
        return silence if silence > max(PATIENCE_S, UNUSUAL * usual) else None


class Watched:
    """Present run, with all its sites.

    Attributes:
        run: last start or resumption, by the time of the event.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self._sites: dict[int, WatchedSite] = {}

    def take(self, event: Event, heard: float) -> None:
        """Adds the next event of a file; `heard` is the time of the file's last write."""
        self._sites.setdefault(event.rank, WatchedSite(event.rank)).take(event, heard)
        if isinstance(event, Run) and (self.run is None or event.time >= self.run.time):
            self.run = event

    @property
    def sites(self) -> list[WatchedSite]:
        """Sites of the present run, in order; an earlier run may have had more."""
        most = self.run.sites if self.run else math.inf
        return [site for rank, site in sorted(self._sites.items()) if rank < most]


def whole_cosine(layers: Iterable[Layer]) -> float | None:
    """Returns the cosine between a site's whole gradient and the mean, from those of its layers."""
    told = [
        (e.cosine, e.gradient_norm, e.mean_norm)
        for e in layers
        if e.cosine is not None and e.gradient_norm is not None and e.mean_norm is not None
    ]
    dot = sum(map(math.prod, told))
    norms = math.hypot(*(own for _, own, _ in told)) * math.hypot(*(mean for *_, mean in told))
    return dot / norms if norms > 0 else None


def mean_over(series: Sequence[Series]) -> list[float]:
    """Returns means at common steps, oldest first; without any, the first series' values."""
    if not series:
        return []
    common = [step for step in series[0] if all(step in s for s in series)]
    if not common:
        return [*series[0].values()]
    return [sum(s[step] for s in series) / len(series) for step in common]
