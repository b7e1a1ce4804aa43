"""Figures of all sites together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from outergrad.events import Layer
from outergrad.tools.watch.state import SiteLayer, Watched, WatchedSite, mean_over

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
