"""What is known of a run: the last that each site told, and some of what was before."""

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
    """The last values by their steps, oldest first."""

    def add(self, step: int, value: float) -> None:
        """Takes the value of a step; of one that came before, the later value counts."""
        self[step] = value
        if len(self) > RECENT:
            del self[next(iter(self))]

    def forget_from(self, step: int) -> None:
        """Forgets what is of this step or a later one."""
        for late in [at for at in self if at >= step]:
            del self[late]


@dataclass
class SiteLayer:
    """One layer at one site.

    Attributes:
        last: the last that was told.
        sent_bytes: of all its events.
        effective_rank: of recent steps.
    """

    last: Layer
    sent_bytes: int = 0
    effective_rank: Series = field(default_factory=Series)

    def take(self, event: Layer) -> None:
        """Takes another event of it."""
        self.last, self.sent_bytes = event, self.sent_bytes + event.sent_bytes
        if event.effective_rank is not None:
            self.effective_rank.add(event.step, event.effective_rank)


class WatchedSite:
    """What one site told of the present run.

    Attributes:
        rank: of the site.
        run: how its steps began; None if that was never written.
        layers: by name.
        steps: the last ones.
        mishaps: the last steps that came to nothing.
        trial: the last of `og.Auto()`; None before one.
        change: who takes part, if that has changed.
        scalars: by name, in the order in which they came.
        ended: that its program has ended, and how; None while it goes on.
        agreement: cosine between its own gradient and the mean one, over all layers.
        step: the last one that it told of, in any event.
        time: of its clock, then; seconds since 1970.
        heard: when its file was last written to, in seconds since 1970.
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
        """Takes the next event of its file."""
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
        """Seconds without news, if they are many more than usual and it has not ended."""
        if self.ended is not None:
            return None
        silence = now - self.heard
        usual = max(self._gaps_s, default=0.0)
        return silence if silence > max(PATIENCE_S, UNUSUAL * usual) else None


class Watched:
    """The present run, of all sites.

    Attributes:
        run: how it began, as the site told that began last.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self._sites: dict[int, WatchedSite] = {}

    def take(self, event: Event, heard: float) -> None:
        """Takes the next event of a file that was last written to then."""
        self._sites.setdefault(event.rank, WatchedSite(event.rank)).take(event, heard)
        if isinstance(event, Run) and (self.run is None or event.time >= self.run.time):
            self.run = event

    @property
    def sites(self) -> list[WatchedSite]:
        """Those of the present run, in order: an earlier one may have had more."""
        most = self.run.sites if self.run else math.inf
        return [site for rank, site in sorted(self._sites.items()) if rank < most]


def whole_cosine(layers: Iterable[Layer]) -> float | None:
    """Cosine between a site's whole gradient and the mean one, from those of its layers."""
    told = [
        (e.cosine, e.gradient_norm, e.mean_norm)
        for e in layers
        if e.cosine is not None and e.gradient_norm is not None and e.mean_norm is not None
    ]
    dot = sum(map(math.prod, told))
    norms = math.hypot(*(own for _, own, _ in told)) * math.hypot(*(mean for *_, mean in told))
    return dot / norms if norms > 0 else None


def mean_over(series: Sequence[Series]) -> list[float]:
    """The means of the steps that all of them have, oldest first; else the first's values."""
    if not series:
        return []
    common = [step for step in series[0] if all(step in s for s in series)]
    if not common:
        return [*series[0].values()]
    return [sum(s[step] for s in series) / len(series) for step in common]
