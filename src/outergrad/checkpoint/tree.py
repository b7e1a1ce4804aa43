"""States as trees: which of their tensors several sites have alike, and trees without these."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from outergrad.messages.raw import digest

_ELSEWHERE = "outergrad: tensor elsewhere"
"""Key of what stands in a tree for a tensor that is kept beside it."""


def tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """Every ordinary tensor of a tree of dicts, lists and tuples, by its place."""
    found: list[tuple[str, Tensor]] = []

    def note(leaf: Any, place: str) -> None:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_complex():
            found.append((place, leaf))

    _mapped(tree, note)
    return found


def digests(tree: Any) -> dict[int, str]:
    """The place of every tensor, by a digest of the place, the form and the content."""
    forms = ((f"{place}: {tuple(t.shape)} {t.dtype}", place, t) for place, t in tensors(tree))
    return {digest(form.encode(), [t]): place for form, place, t in forms}


def without(tree: Any, elsewhere: Collection[str]) -> Any:
    """The tree with marks for the tensors of some places."""
    return _mapped(tree, lambda leaf, at: {_ELSEWHERE: at} if at in elsewhere else leaf)


def whole(tree: Any, elsewhere: Mapping[str, Tensor]) -> Any:
    """The tree with the tensors that its marks stand for.

    Raises:
        KeyError: one is not there.
    """
    return _mapped(tree, lambda leaf, _: elsewhere[leaf[_ELSEWHERE]] if _marks(leaf) else leaf)


def _mapped(tree: Any, change: Callable[[Any, str], Any], place: str = "") -> Any:
    """The tree with its leaves changed, by what they are and their place."""
    if isinstance(tree, dict) and not _marks(tree):
        new = copy.copy(tree)  # a model's state has its versions in an attribute
        new.update({k: _mapped(item, change, f"{place}/{k!r}") for k, item in tree.items()})
        return new
    if type(tree) in (list, tuple):
        items = enumerate(tree)
        return type(tree)([_mapped(item, change, f"{place}/{k!r}") for k, item in items])
    return change(tree, place)


def _marks(tree: Any) -> bool:
    return isinstance(tree, dict) and _ELSEWHERE in tree
