"""Findings that nobody measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outergrad.launch.traffic import InterfaceTraffic
from outergrad_lab.bench.measure import Block
from outergrad_lab.bench.plan import COMPARED, Plan
from outergrad_lab.bench.results import Arrival, LinkResult, Probe, Results, Timing
from outergrad_lab.bench.site import Found
from outergrad_lab.bench.trainer import Phases
from outergrad_lab.bench.until import Mark

RATES = {"10mbit": 1e7, "100mbit": 1e8, "1gbit": 1e9, "none": None, "loopback": None}


def block(
    *steps_s: float, sent_bytes: float = 0, packets: float = 0, claimed_bytes: int | None = None
) -> Block:
    """A block whose steps took so long, all of it in the forward pass."""
    steps = [Phases(seconds, 0.0, 0.0) for seconds in steps_s]
    return Block(steps, InterfaceTraffic(sent_bytes, packets), claimed_bytes)


def site(**blocks: list[Block]) -> Found:
    """What a site found, by method."""
    return Found("synthetic", None, blocks=blocks)


def timing(method: str, scale: float = 1.0, **changes: Any) -> Timing:
    """A method whose step takes 100 ms and 1 MB, times a scale."""
    seconds, sent_bytes = 0.1 * scale, 1e6 * scale
    usual: dict[str, Any] = {
        "method": method,
        "rounds_s": [[seconds, seconds]],
        "median_s": seconds,
        "quartiles_s": (0.9 * seconds, 1.1 * seconds),
        "ratio_to_ddp": scale,
        "sent_bytes": 0.0 if method == "alone" else sent_bytes,
        "payload_bytes": 0.95 * sent_bytes,
        "packets": sent_bytes / 1448,
        "sent_bytes_by_site": [sent_bytes, sent_bytes],
        "claimed_bytes": None,
        "phases_s": {"forward_s": 0.4 * seconds, "backward_s": 0.6 * seconds},
    }
    return Timing(**usual | changes)


def arrival(method: str, losses: Sequence[float] = (2.0, 0.5), *, reached: bool = True) -> Arrival:
    """A method that looked at its test loss every 20 steps."""
    way = [Mark(20 * n, 1.5 * n, 1e6 * n, loss) for n, loss in enumerate(losses, start=1)]
    return Arrival(method=method, reached=reached, way=way, **asdict(way[-1]))


def link(name: str = "100mbit", **changes: Any) -> LinkResult:
    """A link without anything measured, but for what is given."""
    usual: dict[str, Any] = {
        "link": name,
        "rate_bit_per_s": RATES[name],
        "rtt_s": 0.0,
        "loopback": name == "loopback",
        "probe": Probe(rate_bit_per_s=9.5e7, rtt_s=2e-4),
        "data": "mnist",
    }
    return LinkResult(**usual | changes)


def results(*links: LinkResult, notes: Sequence[str] = (), **plan: Any) -> Results:
    """A whole run over some links."""
    return Results(
        about={"command": "outergrad bench"},
        plan=asdict(Plan(**plan)),
        parameters=1000,
        notes=list(notes),
        links=list(links),
    )


def timed_links(*names: str, methods: Sequence[str] = COMPARED) -> list[LinkResult]:
    """Links on which methods were timed."""
    return [
        link(name, timings=[timing(method, 1.5**-n) for n, method in enumerate(methods)])
        for name in names
    ]


def arrived_links(*names: str, methods: Sequence[str] = COMPARED) -> list[LinkResult]:
    """Links on which methods were trained to a loss."""
    return [link(name, arrivals=[arrival(method) for method in methods]) for name in names]
