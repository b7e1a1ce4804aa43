"""Puts together what the sites have measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from outergrad_lab.bench.measure import Block
from outergrad_lab.bench.results import Arrival, Timing
from outergrad_lab.bench.site import Found
from outergrad_lab.bench.trainer import Phases
from outergrad_lab.bench.until import Mark


def timings(found: Sequence[Found]) -> list[Timing]:
    """Puts the blocks of all sites together, method by method."""
    ddp = found[0].blocks.get("ddp")
    ddp_s = _slowest_s([site.blocks["ddp"] for site in found]) if ddp else None
    return [_timing(name, [site.blocks[name] for site in found], ddp_s) for name in found[0].blocks]


def _timing(method: str, sites: list[list[Block]], ddp_s: list[list[float]] | None) -> Timing:
    rounds_s = _slowest_s(sites)
    steps_s = [seconds for block in rounds_s for seconds in block]
    sent = [sum((b.sent.sent_bytes for b in blocks), 0.0) / len(steps_s) for blocks in sites]
    low, median, high = np.percentile(steps_s, (25, 50, 75)).tolist()
    return Timing(
        method=method,
        rounds_s=rounds_s,
        median_s=median,
        quartiles_s=(low, high),
        ratio_to_ddp=_ratio(rounds_s, ddp_s) if ddp_s else None,
        sent_bytes=statistics.mean(sent),
        payload_bytes=_per_step([[b.sent.payload_bytes for b in s] for s in sites], len(steps_s)),
        packets=_per_step([[b.sent.packets for b in s] for s in sites], len(steps_s)),
        sent_bytes_by_site=sent,
        claimed_bytes=_claimed(sites, len(steps_s)),
        phases_s=_phases([phases for block in sites[0] for phases in block.steps]),
    )


def _slowest_s(sites: list[list[Block]]) -> list[list[float]]:
    """Seconds of each step at the site that took longest, block by block."""
    return [
        [
            max(phases.step_s for phases in step)
            for step in zip(*(b.steps for b in blocks), strict=True)
        ]
        for blocks in zip(*sites, strict=True)
    ]


def _ratio(ours_s: list[list[float]], ddp_s: list[list[float]]) -> float:
    both = zip(ours_s, ddp_s, strict=False)  # a slow method has fewer rounds
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in both)


def _per_step(counts: list[list[float]], steps: int) -> float:
    return statistics.mean(sum(site) for site in counts) / steps


def _claimed(sites: list[list[Block]], steps: int) -> float | None:
    claimed = [[b.claimed_bytes for b in blocks if b.claimed_bytes is not None] for blocks in sites]
    return _per_step([[float(c) for c in site] for site in claimed], steps) if claimed[0] else None


def _phases(steps: list[Phases]) -> dict[str, float]:
    medians = {name: statistics.median(getattr(s, name) for s in steps) for name in Phases.names()}
    return {name: seconds for name, seconds in medians.items() if seconds == seconds}


def arrivals(found: Sequence[Found], until_loss: float) -> list[Arrival]:
    """Puts the marks of all sites together, method by method."""
    return [_arrival(name, [s.marks[name] for s in found], until_loss) for name in found[0].marks]


def _arrival(method: str, sites: list[list[Mark]], until_loss: float) -> Arrival:
    way = [
        Mark(
            steps=marks[0].steps,
            seconds=max(mark.seconds for mark in marks),
            sent_bytes=statistics.mean(mark.sent_bytes for mark in marks),
            loss=marks[0].loss,
        )
        for marks in zip(*sites, strict=True)
    ]
    last = way[-1]
    return Arrival(method=method, reached=last.loss <= until_loss, way=way, **asdict(last))
