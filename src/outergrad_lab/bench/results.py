"""Results of a benchmark, as they are kept in a file."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outergrad._whole_files import write_whole
from outergrad_lab.bench.until import Mark

UNSHAPED_BYTES = 16_000_000
HALF_SECOND = 0.5


@dataclass(frozen=True)
class Probe:
    """Rate and latency of a link, measured with a large message and small ones.

    Attributes:
        rate_bit_per_s: Payload rate of a message from site 0 to site 1.
        rtt_s: Fastest round trip of a small message, in seconds.
    """

    rate_bit_per_s: float
    rtt_s: float


def probe(rate_bit_per_s: float | None) -> Probe | None:
    """Measures the link between sites 0 and 1; every site must call it.

    Args:
        rate_bit_per_s: Expected rate, for a message of half a second; None if unshaped.

    Returns:
        Measurement of site 0; None at the other sites.
    """
    size = UNSHAPED_BYTES if rate_bit_per_s is None else int(rate_bit_per_s / 8 * HALF_SECOND)
    small, large = torch.zeros(1), torch.zeros(max(1, min(size, UNSHAPED_BYTES) // 4))
    if dist.get_rank() == 0:
        rtt_s = min(_there_and_back(small, small) for _ in range(5))
        large_s = min(_there_and_back(large, small) for _ in range(2))  # TCP starts slowly
        return Probe(8 * large.nbytes / max(large_s - rtt_s, 1e-6), rtt_s)
    if dist.get_rank() == 1:
        for message in 5 * [small] + 2 * [large]:
            dist.recv(message, 0)
            dist.send(small, 0)
    return None


def _there_and_back(message: torch.Tensor, answer: torch.Tensor) -> float:
    began = time.perf_counter()
    dist.send(message, 1)
    dist.recv(answer, 1)
    return time.perf_counter() - began


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One method on one link. Bytes are per step and a mean over sites, unless by site.

    Attributes:
        method: Name of the method.
        rounds_s: Seconds of each timed step until the last site has made it, block by block.
        median_s: Their median.
        quartiles_s: Their first and third quartile.
        ratio_to_ddp: Median over rounds of the block's median to that of DDP in that round, so
            that what slows the machine for a while falls on both; None without DDP.
        sent_bytes: Bytes that the interface sent, headers and acknowledgements included.
        payload_bytes: Bytes that the interface sent, without the headers of packets.
        packets: Number of packets.
        sent_bytes_by_site: Bytes that the interface of each site sent.
        claimed_bytes: Sent bytes by `session.stats()`, or by a peer; None for other methods.
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
    """One method's course to the wanted loss on one link: its last mark, and all marks before.

    Seconds are those at the slowest site, bytes a mean over sites.

    Attributes:
        method: Name of the method.
        reached: Whether it reached the loss; otherwise it was abandoned.
        way: All marks, in order.
    """

    method: str
    reached: bool
    way: list[Mark]


@dataclass(frozen=True, kw_only=True)
class LinkResult:
    """Results on one link.

    Attributes:
        link: Name of the link.
        rate_bit_per_s: Requested rate; None if unshaped.
        rtt_s: Requested round-trip time, in seconds.
        loopback: Whether all sites shared this machine's loopback interface.
        probe: Measured rate and latency.
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
    """Results of a whole benchmark.

    Attributes:
        about: Command, machine, versions and commit.
        plan: Settings of the benchmark.
        parameters: Number of the model's parameters.
        notes: Caveats about the figures.
        links: Results on each link.
    """

    about: dict[str, Any]
    plan: dict[str, Any]
    parameters: int
    notes: list[str]
    links: list[LinkResult]

    def save(self, path: Path) -> None:
        """Writes JSON atomically; a loss that is no number becomes null."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(asdict(self)), indent=1, default=str, allow_nan=False)
        write_whole(path, text + "\n")

    @staticmethod
    def load(path: Path) -> Results:
        """Reads a saved file."""
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
    """Returns the value with None for infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
