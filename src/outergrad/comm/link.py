"""The measurement of the link to the other sites, by a few exchanges."""

from __future__ import annotations

import math
import time

import torch

from outergrad.comm.words import words_of_all
from outergrad.core.errors import ExchangeError
from outergrad.core.transport import Comm
from outergrad.core.types import Link

_SMALL_PAIRS = 4
_LARGE_PAIRS = 2
_MIDDLE_BYTES = 1 << 14
_LARGE_BYTES = 1 << 18
"""Bytes that a site sends in one of the larger exchanges: all four take 0.9 s at 10 Mbit/s."""
_LONG_S = 0.25
"""Seconds of the middle exchange from which on it alone tells the rate of a link."""
_SHORT_S = 0.02
"""Seconds of the large exchange below which it is repeated: a busy CPU counts for much then."""
_MORE_PAIRS = 8

_LEAST_S = 1e-6
"""Seconds below which only clocks and a loopback's noise are measured."""


def measured_link(comm: Comm) -> Link:
    """Returns the delay and rate of the slowest site, the same on every site.

    Blocks until the other sites call it, too; takes about a second at 10 Mbit/s.
    """
    others = comm.world_size - 1
    _exchange_s(comm, 1)  # sites come at different times, and connections may have to be made
    delay_s = min(_exchange_s(comm, 1) for _ in range(_SMALL_PAIRS))
    part_bytes = math.ceil(_MIDDLE_BYTES / others)
    large_s = _least_s(comm, part_bytes)
    if _slowest(comm, Link(large_s, 1.0)).delay_s < _LONG_S:
        part_bytes = math.ceil(_LARGE_BYTES / others)
        large_s = _least_s(comm, part_bytes)
        if _slowest(comm, Link(large_s, 1.0)).delay_s < _SHORT_S:
            large_s = min(large_s, _least_s(comm, part_bytes, _MORE_PAIRS))
    rate = part_bytes * others / max(large_s - delay_s, _LEAST_S)
    return _slowest(comm, Link(delay_s, rate))


def _least_s(comm: Comm, nbytes: int, pairs: int = _LARGE_PAIRS) -> float:
    """Returns the seconds of the fastest of some exchanges: the CPU may be busy in others."""
    return min(_exchange_s(comm, nbytes) for _ in range(pairs))


def _exchange_s(comm: Comm, nbytes: int) -> float:
    """Returns the seconds of an all-gather with so many bytes of each site.

    They are half of two all-gathers: if a site is ahead of another, its first takes as much longer
    as its second takes less.
    """
    message = torch.zeros(nbytes, dtype=torch.uint8, device=comm.device)
    began = time.perf_counter()
    for _ in range(2):
        for part in comm.all_gather(message, [nbytes] * comm.world_size).wait():
            part[-1].item()  # waits until the device has it, too
    return max((time.perf_counter() - began) / 2, _LEAST_S)


def _slowest(comm: Comm, link: Link) -> Link:
    told = words_of_all(comm, [round(1e9 * link.delay_s), round(link.bytes_per_s)])
    comm.all_began()
    for rank, (delay, rate) in enumerate(told):
        if delay < 0 or rate <= 0:
            raise ExchangeError(
                f"{comm.sites[rank].called} measured a delay of {delay} ns and {rate} bytes/s"
            )
    return Link(1e-9 * max(delay for delay, _ in told), float(min(rate for _, rate in told)))
