"""Measures rate and latency of the link between two sites before a benchmark."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
