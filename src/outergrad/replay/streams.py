"""Random numbers that every site can draw again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()
"""The default generator belongs to the process: threads would draw from each other's seeds."""


class Draws:
    """What `recorded` found out.

    Attributes:
        seed: with which the numbers can be drawn again, as text of one length; None if none were
            drawn.
    """

    seed: str | None = None


@contextmanager
def recorded(device: torch.device) -> Iterator[Draws]:
    """Draws from a seed of its own inside; outside, the stream goes on as if one had been drawn.

    The seed is a function of the stream's state, and a stream from which nothing was drawn inside
    is left as it was: a part of a model without dropout changes no random number of the others.
    """
    draws = Draws()
    with _LOCK:
        seed = next_seed(device)
        with _forked(device):
            _seed(seed, device)
            before = _states(device)
            yield draws
            drawn = not all(map(torch.equal, _states(device), before))
            draws.seed = f"{seed:016x}" if drawn else None
        if draws.seed is not None:
            torch.rand((), device=device)


@contextmanager
def replayed(seed: str | None, device: torch.device) -> Iterator[None]:
    """Draws the same numbers again, and leaves the stream outside as it is."""
    with _forked(device):
        if seed is not None:
            _seed(int(seed, 16), device)
        yield


@contextmanager
def _forked(device: torch.device) -> Iterator[None]:
    with _LOCK, torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _seed(seed: int, device: torch.device) -> None:
    """Of the host and the device; `torch.manual_seed` does more, which takes milliseconds."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _states(device: torch.device) -> list[torch.Tensor]:
    """Of all streams that something on the device may draw from: the host's, too."""
    host = torch.get_rng_state()
    return [host] if device.type == "cpu" else [_state(device), host]


def next_seed(device: torch.device) -> int:
    """A number that the state decides, without drawing it from there."""
    generator = torch.Generator(device)
    generator.set_state(_state(device))
    return int(torch.randint(2**60, (), generator=generator, device=device))
