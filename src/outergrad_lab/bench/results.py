"""What a benchmark found, as it is kept in a file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outergrad._whole_files import write_whole
from outergrad_lab.bench.probe import Probe
from outergrad_lab.bench.until import Mark


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One method on one link. Bytes are per step and a mean over sites, unless by site.

    Attributes:
        method: Its name.
        rounds_s: Seconds of each timed step until the last site has made it, block by block.
        median_s: Their median.
        quartiles_s: Their first and third quartile.
        ratio_to_ddp: Median over rounds of the block's median to that of DDP in that round, so
            that what slows the machine for a while falls on both; None without DDP.
        sent_bytes: What the interface sent, headers and acknowledgements included.
        payload_bytes: The same without the headers of packets.
        packets: Number of packets.
        sent_bytes_by_site: For each site.
        claimed_bytes: What `session.stats()`, or a peer, says was sent; None of others.
        phases_s: Median seconds of each phase of a step at site 0.
    """

    method: str
    rounds_s: list[list[float]]
    median_s: float
    quartiles_s: tuple[float, float]
    ratio_to_ddp: float | None
    sent_bytes: float
    payload_bytes: float
    packets: float
    sent_bytes_by_site: list[float]
    claimed_bytes: float | None
    phases_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Arrival(Mark):
    """One method's way to the wanted loss on one link: where it ended, and how it got there.

    Seconds are those at the slowest site, bytes a mean over sites.

    Attributes:
        method: Its name.
        reached: Whether it got there, or was given up.
        way: Every mark on the way.
    """

    method: str
    reached: bool
    way: list[Mark]


@dataclass(frozen=True, kw_only=True)
class LinkResult:
    """What came out on one link.

    Attributes:
        link: Its name.
        rate_bit_per_s: What was asked for; None if unshaped.
        rtt_s: Latency that was asked for, there and back.
        loopback: Whether all sites shared this machine's loopback interface.
        probe: What the link could do.
        data: Name of the data.
        timings: One per method, or none with a wanted loss.
        arrivals: One per method, or none without.
    """

    link: str
    rate_bit_per_s: float | None
    rtt_s: float
    loopback: bool
    probe: Probe | None
    data: str
    timings: list[Timing] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Results:
    """A whole run.

    Attributes:
        about: Command, machine, versions and commit.
        plan: What was asked for.
        parameters: Number of the model's parameters.
        notes: What a reader must know to believe the figures.
        links: What came out, link by link.
    """

    about: dict[str, Any]
    plan: dict[str, Any]
    parameters: int
    notes: list[str]
    links: list[LinkResult]

    def save(self, path: Path) -> None:
        """Writes JSON, whole or not at all; a loss that is no number becomes null."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(asdict(self)), indent=1, default=str, allow_nan=False)
        write_whole(path, text + "\n")

    @staticmethod
    def load(path: Path) -> Results:
        """Reads what was saved."""
        found = json.loads(path.read_text())
        return Results(**found | {"links": [_link(link) for link in found["links"]]})


def _link(found: dict[str, Any]) -> LinkResult:
    parts: dict[str, Any] = {
        "probe": found["probe"] and Probe(**found["probe"]),
        "timings": [Timing(**timing) for timing in found["timings"]],
        "arrivals": [
            Arrival(**one | {"way": [Mark(**mark) for mark in one["way"]]})
            for one in found["arrivals"]
        ],
    }
    return LinkResult(**found | parts)


def _finite(value: Any) -> Any:
    """The same without infinity and NaN, which JSON has no words for."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
