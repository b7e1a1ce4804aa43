"""Figures of a run, added up from its events: for recorders and `outergrad watch`."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from outergrad.events import (
    Change,
    End,
    Evaluation,
    Event,
    Exchange,
    Layer,
    Mishap,
    Privacy,
    Run,
    Scalars,
    Step,
    Trial,
)

STEP = (
    "seconds",
    "sent_bytes",
    "received_bytes",
    "total_sent_bytes",
    "compress_s",
    "replay_s",
    "wait_s",
    "noise_batches",
)
LAYER = (
    "sent_bytes",
    "received_bytes",
    "wait_s",
    "effective_rank",
    "rank_bound",
    "relative_error",
    "residual_norm",
    "activation_norm",
    "delta_norm",
    "gradient_norm",
    "mean_norm",
    "cosine",
    "duplicates",
    "sample_norm",
)
ROWS = ("rows", "kept_rows", "compress_s")
BY_GROUP = ("group_gradient", "group_activations", "group_deltas")
GROUPS = (
    "step",
    "mishap",
    "trial",
    *LAYER,
    *ROWS,
    *BY_GROUP,
    "replay_s",
    "spectral_norm",
    "largest_sample_norm",
    "travels",
    "evaluation",
    "alone",
    "gain",
    "privacy",
)
"""Prefixes of tags, before the slash."""


def figures(event: Event) -> dict[str, float]:
    """Returns the numbers of an event, by tag.

    A layer's tags are `<figure>/<layer>`, so that a dashboard shows all layers of one figure
    together; `spectral_norm` is the largest singular value of the mean gradient. Those of a group
    of samples, `<figure>/<layer>/<group>`, are largest singular values, too. A step's tags are
    `step/<figure>`. A failed step is a 1 at `mishap/<what>`, and a trial of `og.Auto()` is
    `trial/seconds` and `trial/kept_seconds`. An evaluation's tags are `evaluation/<figure>`,
    `alone/<figure>` and `gain/<figure>`; what was released is `privacy/steps` and
    `privacy/<observer>`, ε. Scalars of the training loop keep their own names.
    Figures that were not measured, or have no meaning for the way in which a layer was sent, are
    left out.
    """
    match event:
        case Scalars():
            return dict(event.values)
        case Evaluation():
            return _of_evaluation(event)
        case Mishap():
            return {f"mishap/{event.what}": 1.0}
        case Trial():
            return {"trial/seconds": event.seconds, "trial/kept_seconds": event.kept_seconds}
        case Privacy():
            spent = {f"privacy/{observer}": v for observer, v in event.epsilon.items()}
            return {"privacy/steps": float(event.steps), **spent}
        case Step():
            return {f"step/{name}": v for name in STEP if (v := getattr(event, name)) is not None}
        case Layer():
            return _of_layer(event)
    return {}  # events about the run itself have no numbers


def _of_evaluation(event: Evaluation) -> dict[str, float]:
    told = (("evaluation", event.figures), ("alone", event.alone), ("gain", event.gains))
    return {f"{group}/{name}": of[0] for group, found in told for name, of in found.items()}


def about(run: Run) -> dict[str, str | int]:
    """Returns a run's description, for a table of runs."""
    names = ("method", "rank", "sites", "step", "dense_bytes", "outergrad", "torch")
    return {name: getattr(run, name) for name in names}


def _of_layer(event: Layer) -> dict[str, float]:
    names = LAYER
    if event.travels in ("factors", "low rank"):
        names += ROWS
    if event.travels == "replayed":
        names += ("replay_s",)
    tags = {f"{n}/{event.layer}": v for n in names if (v := getattr(event, n)) is not None}
    if event.singular_values:
        tags[f"spectral_norm/{event.layer}"] = event.singular_values[0]
    for name in BY_GROUP:
        found = (getattr(event, name) or {}).items()
        tags |= {f"{name}/{event.layer}/{label}": of[0] for label, of in found if of}
    if event.outlier_norms:
        tags[f"largest_sample_norm/{event.layer}"] = event.outlier_norms[0]
    return tags


def first_again(kind: str, step: int) -> int:
    """Returns the first step, as events of this kind count, that a run resumed at `step` repeats.

    Scalars, evaluations and what was released count the steps that are done, other events the
    steps before theirs.
    """
    return step + (kind in ("scalars", "evaluation", "privacy"))


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
        exchange: last exchange with a quorum; None before one.
        privacy: what was released so far; None where nothing is counted.
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
        self.exchange: Exchange | None = None
        self.privacy: Privacy | None = None
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
            case Exchange():
                self.exchange = event
            case Privacy():
                self.privacy = event
            case End():
                self.ended = event
            case Step():
                self._take_step(event)

    def _begin(self, run: Run) -> None:
        if run.step == 0:
            self._start_afresh(run)
        for series in self.scalars.values():
            series.forget_from(first_again("scalars", run.step))
        for series in (self.agreement, *(at.effective_rank for at in self.layers.values())):
            series.forget_from(first_again("layer", run.step))
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


PARTS = ("compress", "replay", "wait")


@dataclass(frozen=True)
class Speed:
    """Speed of the sites; None if not known yet.

    Attributes:
        step_s: seconds per step, averaged over the sites and their last recorded steps.
        sent_bytes: bytes per step and site.
        total_sent_bytes: bytes per site, in all steps.
        fewer: ratio of DDP's bytes to those of the run.
        parts_s: seconds of "compress", "replay" and "wait" in a step; of the first steps alone
            where seconds per step are not known yet.
    """

    step_s: float | None
    sent_bytes: float | None
    total_sent_bytes: float | None
    fewer: float | None
    parts_s: Mapping[str, float]

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes that a site sends per second."""
        return self.sent_bytes / self.step_s if self.sent_bytes and self.step_s else None


def speed(watched: Watched) -> Speed:
    """Returns the speed of all sites over their last recorded steps."""
    sites = [site for site in watched.sites if site.steps]
    steps = [step for site in sites for step in site.steps]
    timed = [step for step in steps if step.seconds] or steps
    sent = _mean(map(_sent_per_step, sites))
    dense = watched.run.dense_bytes if watched.run else 0
    return Speed(
        step_s=_mean(step.seconds for step in steps if step.seconds),
        sent_bytes=sent,
        total_sent_bytes=_mean(site.steps[-1].total_sent_bytes for site in sites),
        fewer=dense / sent if sent and dense else None,
        parts_s={
            name: _mean(getattr(step, f"{name}_s") for step in timed) or 0.0 for name in PARTS
        },
    )


def _sent_per_step(site: WatchedSite) -> float:
    """Mean bytes of all steps between recorded ones, which may differ from those."""
    first, last = site.steps[0], site.steps[-1]
    if last.step == first.step:
        return last.sent_bytes
    return (last.total_sent_bytes - first.total_sent_bytes) / (last.step - first.step)


def scalars(watched: Watched) -> dict[str, list[float]]:
    """Returns recent values by name, averaged over the sites; losses come first."""
    names = dict.fromkeys(name for site in watched.sites for name in site.scalars)
    ordered = sorted(names, key=lambda name: "loss" not in name.lower())
    return {
        name: mean_over([site.scalars[name] for site in watched.sites if name in site.scalars])
        for name in ordered
    }


@dataclass(frozen=True)
class Agreement:
    """Agreement of the sites' gradients with their mean.

    Attributes:
        least: smallest cosine.
        site: rank of the site that has it.
        most: largest cosine.
        history: recent means over the sites.
    """

    least: float
    site: int
    most: float
    history: Sequence[float]


def agreement(watched: Watched) -> Agreement | None:
    """Returns the agreement in the last recorded steps; None if it was not measured."""
    told = {site.rank: site.agreement for site in watched.sites if site.agreement}
    if not told:
        return None
    last = {rank: [*series.values()][-1] for rank, series in told.items()}
    least = min(last, key=last.__getitem__)
    return Agreement(last[least], least, max(last.values()), mean_over([*told.values()]))


def silence(watched: Watched, now: float) -> float | None:
    """Returns the seconds since news of any site, if all sites that have not ended are silent."""
    silences = [site.silence_s(now) for site in watched.sites if not site.ended]
    known = [s for s in silences if s is not None]
    return min(known) if known and len(known) == len(silences) else None


@dataclass(frozen=True)
class LayerLine:
    """One layer at all sites.

    Attributes:
        told: each site's last event.
        effective_rank: recent values of the first site.
    """

    told: Sequence[Layer]
    effective_rank: Sequence[float]

    @property
    def last(self) -> Layer:
        """Last event of the first site."""
        return self.told[0]

    @property
    def cosine(self) -> float | None:
        """Smallest cosine of the sites."""
        return min((e.cosine for e in self.told if e.cosine is not None), default=None)

    @property
    def relative_error(self) -> float | None:
        """Largest relative error of the sites."""
        errors = (e.relative_error for e in self.told if e.relative_error is not None)
        return max(errors, default=None)

    @property
    def duplicates(self) -> float | None:
        """Mean share of duplicates over the sites."""
        return _mean(e.duplicates for e in self.told if e.duplicates is not None)

    def mean(self, figure: str) -> float:
        """Returns the mean over the sites of a field of `Layer`."""
        return fmean(getattr(event, figure) for event in self.told)


def layer_lines(watched: Watched) -> list[LayerLine]:
    """Returns all layers, starting with those that sent most bytes."""
    by_name: dict[str, list[SiteLayer]] = {}
    for site in watched.sites:
        for name, layer in site.layers.items():
            by_name.setdefault(name, []).append(layer)
    ordered = sorted(by_name.values(), key=lambda layers: -layers[0].sent_bytes)
    return [
        LayerLine([layer.last for layer in layers], [*layers[0].effective_rank.values()])
        for layers in ordered
    ]


def noise_batches(watched: Watched) -> float | None:
    """Returns the noise scale, averaged over the sites' last steps."""
    last = (site.steps[-1].noise_batches for site in watched.sites if site.steps)
    return _mean(batches for batches in last if batches is not None)


@dataclass(frozen=True)
class Outlier:
    """Sample that was an outlier in the last measurement of its layer.

    Attributes:
        site: rank of its site.
        sample: its index in the batch.
        layer: layer of the gradient.
        times: its norm, as a multiple of the median of the layer's samples.
    """

    site: int
    sample: int
    layer: str
    times: float


def outliers(watched: Watched) -> list[Outlier]:
    """Returns the outliers of all sites and layers, largest first."""
    found = [
        Outlier(site.rank, sample, name, norm / layer.last.sample_norm)
        for site in watched.sites
        for name, layer in site.layers.items()
        if layer.last.sample_norm
        for sample, norm in zip(layer.last.outliers, layer.last.outlier_norms or (), strict=False)
    ]
    return sorted(found, key=lambda outlier: -outlier.times)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
