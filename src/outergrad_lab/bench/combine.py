"""Combines the measurements of the sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean, median

import numpy as np

from outergrad_lab.bench.measure import Block
from outergrad_lab.bench.results import Arrival, Timing
from outergrad_lab.bench.site import Found
from outergrad_lab.bench.trainer import Phases
from outergrad_lab.bench.until import Mark


def timings(found: Sequence[Found]) -> list[Timing]:
    """Combines the blocks of all sites, method by method."""
    methods = found[0].blocks
    rounds_s = {name: _slowest_s([site.blocks[name] for site in found]) for name in methods}
    return [
        _timing(name, [site.blocks[name] for site in found], rounds_s[name], rounds_s.get("ddp"))
        for name in methods
    ]


def _timing(
    method: str,
    sites: list[list[Block]],
    rounds_s: list[list[float]],
    ddp_s: list[list[float]] | None,
) -> Timing:
    steps_s = np.concatenate(rounds_s)
    sent = [sum(block.sent.sent_bytes for block in site) / len(steps_s) for site in sites]
    blocks = [block for site in sites for block in site]
    steps = len(steps_s) * len(sites)
    claimed = [block.claimed_bytes for block in blocks if block.claimed_bytes is not None]
    low, middle, high = np.percentile(steps_s, (25, 50, 75)).tolist()
    return Timing(
        method=method,
        rounds_s=rounds_s,
        median_s=middle,
        quartiles_s=(low, high),
        ratio_to_ddp=_ratio(rounds_s, ddp_s) if ddp_s else None,
        sent_bytes=mean(sent),
        payload_bytes=sum(block.sent.payload_bytes for block in blocks) / steps,
        packets=sum(block.sent.packets for block in blocks) / steps,
        sent_bytes_by_site=sent,
        claimed_bytes=sum(claimed) / steps if claimed else None,
        phases_s=_phases([phases for block in sites[0] for phases in block.steps]),
    )


def _slowest_s(sites: list[list[Block]]) -> list[list[float]]:
    """Returns seconds from step to step, each when the last site has made it, block by block.

    The longest time of each step would count the waiting of sites that are ahead by turns twice.
    """
    return [_last_s(blocks) for blocks in zip(*sites, strict=True)]


def _last_s(blocks: Sequence[Block]) -> list[float]:
    """Returns the seconds of one block's steps; all sites begin a block at the same moment."""
    ends_s = np.cumsum([[phases.step_s for phases in block.steps] for block in blocks], axis=1)
    return np.diff(ends_s.max(axis=0), prepend=0.0).tolist()


def _ratio(ours_s: list[list[float]], ddp_s: list[list[float]]) -> float:
    both = zip(ours_s, ddp_s, strict=False)  # a slow method has fewer rounds
    return median(median(ours) / median(ddp) for ours, ddp in both)


def _phases(steps: list[Phases]) -> dict[str, float]:
    medians = {name: median(getattr(step, name) for step in steps) for name in Phases.names()}
    return {name: seconds for name, seconds in medians.items() if seconds == seconds}


def arrivals(found: Sequence[Found], until_loss: float) -> list[Arrival]:
    """Combines the marks of all sites, method by method."""
    return [_arrival(name, [s.marks[name] for s in found], until_loss) for name in found[0].marks]


def _arrival(method: str, sites: list[list[Mark]], until_loss: float) -> Arrival:
    way = [
        Mark(
            steps=marks[0].steps,
            seconds=max(mark.seconds for mark in marks),
            sent_bytes=mean(mark.sent_bytes for mark in marks),
            loss=marks[0].loss,
        )
        for marks in zip(*sites, strict=True)
    ]
    last = way[-1]
    return Arrival(method=method, reached=last.loss <= until_loss, way=way, **asdict(last))
