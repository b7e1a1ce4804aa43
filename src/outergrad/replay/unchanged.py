"""Restoration of module attributes and random streams after a replay."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from outergrad.replay.context import replayed

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
