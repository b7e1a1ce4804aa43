"""Figures of all sites together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from outergrad.events import Layer
from outergrad.tools.watch.series import Series, mean_over
from outergrad.tools.watch.state import Site, SiteLayer, Watched


@dataclass(frozen=True)
class Speed:
    """How fast the sites go; what is not known yet is None.

    Attributes:
        step_s: seconds per step, the mean of sites and of the last recorded steps.
        sent_bytes: per step and site.
        total_sent_bytes: per site, in all steps.
        fewer: how many times as many bytes DDP would send.
        compress_s: of these; of the first steps alone where seconds per step are not known yet.
        replay_s: likewise.
        wait_s: likewise.
    """

    step_s: float | None
    sent_bytes: float | None
    total_sent_bytes: float | None
    fewer: float | None
    compress_s: float
    replay_s: float
    wait_s: float

    @property
    def bytes_per_s(self) -> float | None:
        """That a site sends."""
        return self.sent_bytes / self.step_s if self.sent_bytes and self.step_s else None


def speed(watched: Watched) -> Speed:
    """Of all sites, over their last recorded steps."""
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
        compress_s=_mean(step.compress_s for step in timed) or 0.0,
        replay_s=_mean(step.replay_s for step in timed) or 0.0,
        wait_s=_mean(step.wait_s for step in timed) or 0.0,
    )


def _sent_per_step(site: Site) -> float:
    """Over all steps between recorded ones, which need not be like them."""
    first, last = site.steps[0], site.steps[-1]
    if last.step == first.step:
        return last.sent_bytes
    return (last.total_sent_bytes - first.total_sent_bytes) / (last.step - first.step)


def scalars(watched: Watched) -> dict[str, list[float]]:
    """Recent values by name, means over the sites: first what is called a loss."""
    names = dict.fromkeys(name for site in watched.sites for name in site.scalars)
    ordered = sorted(names, key=lambda name: "loss" not in name.lower())
    return {name: mean_over(_having(watched.sites, name)) for name in ordered}


def _having(sites: Iterable[Site], name: str) -> list[Series]:
    return [site.scalars[name] for site in sites if name in site.scalars]


@dataclass(frozen=True)
class Agreement:
    """How the sites' gradients agree with their mean.

    Attributes:
        least: the smallest cosine.
        site: which site has it.
        most: the largest.
        history: recent means over the sites.
    """

    least: float
    site: int
    most: float
    history: Sequence[float]


def agreement(watched: Watched) -> Agreement | None:
    """Of the last recorded steps; None if it was not measured."""
    told = [site for site in watched.sites if any(True for _ in site.agreement)]
    if not told:
        return None
    last = {site.rank: list(site.agreement)[-1] for site in told}
    least = min(last, key=last.__getitem__)
    history = mean_over([site.agreement for site in told])
    return Agreement(last[least], least, max(last.values()), history)


@dataclass(frozen=True)
class LayerLine:
    """One layer at all sites.

    Attributes:
        last: what the first site told last.
        sent_bytes: mean of the sites.
        received_bytes: likewise.
        compress_s: likewise.
        wait_s: likewise.
        cosine: the smallest of the sites.
        relative_error: the largest.
        effective_rank: recent ones.
    """

    last: Layer
    sent_bytes: float
    received_bytes: float
    compress_s: float
    wait_s: float
    cosine: float | None
    relative_error: float | None
    effective_rank: Sequence[float]


def layer_lines(watched: Watched) -> list[LayerLine]:
    """All layers, those that sent most first."""
    by_name: dict[str, list[SiteLayer]] = {}
    for site in watched.sites:
        for name, layer in site.layers.items():
            by_name.setdefault(name, []).append(layer)
    ordered = sorted(by_name.values(), key=lambda layers: -layers[0].sent_bytes)
    return [_layer_line(layers) for layers in ordered]


def _layer_line(layers: list[SiteLayer]) -> LayerLine:
    last = [layer.last for layer in layers]
    cosines = [event.cosine for event in last if event.cosine is not None]
    errors = [event.relative_error for event in last if event.relative_error is not None]
    return LayerLine(
        last=last[0],
        sent_bytes=fmean(event.sent_bytes for event in last),
        received_bytes=fmean(event.received_bytes for event in last),
        compress_s=fmean(event.compress_s for event in last),
        wait_s=fmean(event.wait_s for event in last),
        cosine=min(cosines, default=None),
        relative_error=max(errors, default=None),
        effective_rank=list(layers[0].effective_rank),
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
