"""Conditions of a forward pass, for its replay: autocast dtype, training modes, random streams."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn


def conditions_now(modules: Sequence[nn.Module], device: torch.device) -> dict[str, Any]:
    """Returns the conditions under which modules compute now, as plain values.

    Returns:
        "autocast": name of the dtype of matrix products, or None. "training": training flag of each
            part of the modules, or one flag if all are equal.
    """
    dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    flags = [part.training for part in _parts(modules)]
    return {
        "autocast": dtype if torch.is_autocast_enabled(device.type) else None,
        "training": flags if len(set(flags)) > 1 else flags[0],
    }


@contextmanager
def conditions_as(
    about: Mapping[str, Any], modules: Sequence[nn.Module], device: torch.device
) -> Iterator[None]:
    """Context in which modules compute under conditions of this or another site."""
    name, modes, parts = about["autocast"], about["training"], _parts(modules)
    dtype = None if name is None else getattr(torch, name)
    before = [part.training for part in parts]
    _set(parts, [modes] * len(parts) if isinstance(modes, bool) else modes)
    try:
        with torch.autocast(device.type, dtype, enabled=name is not None, cache_enabled=False):
            yield
    finally:
        _set(parts, before)


def _parts(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [part for module in modules for part in module.modules()]


def _set(parts: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for part, flag in zip(parts, flags, strict=True):
        part.training = flag


_LOCK = threading.RLock()
"""Serialises use of the process's default generator: threads would draw from each other's seeds."""


class Draws:
    """Result of `recorded`.

    Attributes:
        seed: seed from which the numbers can be drawn again, as text of fixed length; None if none
            were drawn.
    """

    seed: str | None = None


@contextmanager
def recorded(device: torch.device) -> Iterator[Draws]:
    """Context that draws from its own seed; the outer stream advances by at most one number.

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
    """Context that draws the same numbers again, and leaves the outer stream as it is."""
    with _forked(device):
        if seed is not None:
            _seed(int(seed, 16), device)
        yield


@contextmanager
def _forked(device: torch.device) -> Iterator[None]:
    with _LOCK, torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _seed(seed: int, device: torch.device) -> None:
    """Seeds the host and the device. `torch.manual_seed` does more, which takes milliseconds."""
    torch.random.default_generator.manual_seed(seed)  # pyright: ignore[reportPrivateImportUsage]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _states(device: torch.device) -> list[torch.Tensor]:
    """States of all streams that code on the device may draw from, including the host's."""
    host = torch.get_rng_state()
    return [host] if device.type == "cpu" else [_state(device), host]


def next_seed(device: torch.device) -> int:
    """Returns a number that the generator's state, in host memory, determines; draws nothing."""
    digest = blake2b(_state(device).numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**60


_DICTS = (dict, OrderedDict, defaultdict, Counter)
_KINDS = frozenset([*_DICTS, list, set, deque])


@contextmanager
def unchanged(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Context that restores what a forward or backward pass inside changes.

    That is the modules' attributes, the contents of dicts, lists, sets and deques among these, and
    the streams of torch, of Python's `random` and of numpy. In-place writes to tensors are not
    undone.
    """
    containers = [(held, _copy(held)) for held in _containers(modules)]
    with replayed(None, device), _streams_kept():
        try:
            yield
        finally:
            for held, before in containers:
                if not _is_same(held, before):
                    _put_back(held, before)


def _containers(modules: Sequence[nn.Module]) -> list[Any]:
    """Attribute dicts of all modules and their children, and the containers found in those."""
    found = {id(vars(part)): vars(part) for module in modules for part in module.modules()}
    left = list(found.values())
    while left:
        for value in _values(left.pop()):
            if type(value) in _KINDS and id(value) not in found:
                found[id(value)] = value
                left.append(value)
    return list(found.values())


def _values(held: Any) -> Iterable[Any]:
    """Values of a container; hooks are left out, for they are many and no forward changes them."""
    if type(held) not in _DICTS:
        return held
    return [value for key, value in held.items() if key not in _HOOKS]


_HOOKS = frozenset(key for key in vars(nn.Module()) if "hook" in key)


def _copy(held: Any) -> Any:
    return dict(held) if type(held) in _DICTS else list(held)


def _is_same(held: Any, before: Any) -> bool:
    if len(held) != len(before):
        return False
    if isinstance(before, dict):
        return held.keys() == before.keys() and all(map(is_, held.values(), before.values()))
    return all(map(is_, held, before))


def _put_back(held: Any, before: Any) -> None:
    held.clear()
    fill = held.extend if isinstance(held, list | deque) else held.update
    fill(before)


@contextmanager
def _streams_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
