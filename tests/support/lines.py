"""Transports with lines between pairs of sites, and letters for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from outergrad.comm.torch import TorchComm
from outergrad.core.transport import Comm, Letter
from ranks import run_ranks
from stars import CPU, comms_on_star, group_on, on_star

SOON_S, LONG_S = 0.05, 10.0
Body = Callable[[Comm], Any]


def letter(number: int, *values: int, share: float = 0.25, ends: bool = False) -> Letter:
    """One whose content is these bytes."""
    return Letter(number, share, torch.tensor(values, dtype=torch.uint8), ends)


def within(seconds: float) -> float:
    """A time by the monotonic clock."""
    return time.monotonic() + seconds


def on_gloo(sites: int, body: Body) -> list[Any]:
    """Runs body(comm) on every site, over a process group of gloo."""
    return run_ranks(sites, lambda _, group: body(TorchComm(group, CPU)))


def on_blind_star(sites: int, body: Body) -> list[Any]:
    """Around a hub that reads nothing."""
    return comms_on_star(sites, body, settings={"blind": True})


def on_group_around_a_hub(sites: int, body: Body) -> list[Any]:
    """Over a process group of some of the sites around a hub: the others have other ranks."""

    def opened(rank: int, one: Any) -> Any:
        if not rank:
            return one.connected(LONG_S) and None
        return body(TorchComm(group_on(one, name="some", ranks=range(1, sites + 1)), CPU))

    return on_star(sites + 1, opened)[1:]


WAYS: dict[str, Callable[[int, Body], list[Any]]] = {
    "gloo": on_gloo,
    "star": comms_on_star,
    "blind star": on_blind_star,
    "group around a hub": on_group_around_a_hub,
}
