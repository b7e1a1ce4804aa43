"""Whether modules were in training when they computed, to compute again so on every site."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

Modes = bool | list[bool]
"""Of all that is in some modules, or of each part."""


def modes_now(modules: Sequence[nn.Module]) -> Modes:
    """Which of them, and of what is in them, are in training."""
    flags = [part.training for part in _parts(modules)]
    return flags if len(set(flags)) > 1 else flags[0]


@contextmanager
def modes_as(modules: Sequence[nn.Module], modes: Modes) -> Iterator[None]:
    """Has them compute as `modes_now` said; another site's may differ from this one's."""
    parts = _parts(modules)
    before = [part.training for part in parts]
    _set(parts, [modes] * len(parts) if isinstance(modes, bool) else modes)
    try:
        yield
    finally:
        _set(parts, before)


def _parts(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [part for module in modules for part in module.modules()]


def _set(parts: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for part, flag in zip(parts, flags, strict=True):
        part.training = flag
