"""What is known of a run: the last that each site told, and some of what was before."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from outergrad.events import End, Event, Layer, Mishap, Run, Scalars, Step
from outergrad.tools.watch.series import RECENT, Series

PATIENCE_S = 10.0
UNUSUAL = 3
_SMOOTHED_STEPS = 8
_MISHAPS = 100


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


class Site:
    """What one site told of the present run.

    Attributes:
        rank: of the site.
        run: how its steps began; None if that was never written.
        layers: by name.
        steps: the last ones.
        mishaps: the last steps that came to nothing.
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
        self.scalars: dict[str, Series] = defaultdict(Series)
        self.agreement = Series()
        self.ended: End | None = None
        self.step, self.time = 0, 0.0
        self._gaps_s: deque[float] = deque(maxlen=RECENT)

    def take(self, event: Event, heard: float) -> None:
        """Takes the next event of its file."""
        self.heard = heard
        if isinstance(event, Run):
            self._begin(event)
        elif isinstance(event, Layer):
            self.layers.setdefault(event.layer, SiteLayer(event)).take(event)
        else:
            self._go_on(event)

    def _begin(self, run: Run) -> None:
        if run.step == 0:
            self._start_afresh(run)
        for layer in self.layers.values():
            layer.effective_rank.forget_from(run.step)
        for series in self.scalars.values():
            series.forget_from(run.step + 1)
        self.agreement.forget_from(run.step)
        self.steps.clear()
        self._gaps_s.clear()
        self.ended = None
        self.run, self.step, self.time = run, run.step, run.time

    def _go_on(self, event: Step | Scalars | Mishap | End) -> None:
        if self.time and event.time > self.time:
            self._gaps_s.append(event.time - self.time)
        self.step, self.time = max(self.step, event.step), max(self.time, event.time)
        if isinstance(event, Scalars):
            for name, value in event.values.items():
                self.scalars[name].add(event.step, value)
            return
        if isinstance(event, Mishap):
            self.mishaps.append(event)
            return
        if isinstance(event, End):
            self.ended = event
            return
        self.steps.append(event)
        layers = [layer.last for layer in self.layers.values() if layer.last.step == event.step]
        if (cosine := whole_cosine(layers)) is not None:
            self.agreement.add(event.step, cosine)

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
        self._sites: dict[int, Site] = {}

    def take(self, event: Event, heard: float) -> None:
        """Takes the next event of a file that was last written to then."""
        self._sites.setdefault(event.rank, Site(event.rank)).take(event, heard)
        if isinstance(event, Run) and (self.run is None or event.time >= self.run.time):
            self.run = event

    @property
    def sites(self) -> list[Site]:
        """Those of the present run, in order: an earlier one may have had more."""
        most = self.run.sites if self.run else math.inf
        return [site for rank, site in sorted(self._sites.items()) if rank < most]


def whole_cosine(layers: list[Layer]) -> float | None:
    """Cosine between a site's whole gradient and the mean one, from those of its layers."""
    told = [
        (layer.cosine, layer.gradient_norm, layer.mean_norm)
        for layer in layers
        if layer.cosine is not None
        and layer.gradient_norm is not None
        and layer.mean_norm is not None
    ]
    dot = sum(cosine * own * mean for cosine, own, mean in told)
    norms = math.hypot(*(own for _, own, _ in told)) * math.hypot(*(mean for _, _, mean in told))
    return dot / norms if norms > 0 else None
