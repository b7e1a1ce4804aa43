"""States as trees: digests of their tensors, and trees without some of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from outergrad.messages.raw import digest

_ELSEWHERE = "outergrad: tensor elsewhere"
"""Key of the mark that replaces a tensor which is stored in another file."""


def tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """Returns every dense, real tensor in a tree of dicts, lists and tuples, with its path."""
    found: list[tuple[str, Tensor]] = []

    def note(leaf: Any, place: str) -> None:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_complex():
            found.append((place, leaf))

    _mapped(tree, note)
    return found


def digests(tree: Any) -> dict[int, str]:
    """Returns the path of every tensor, by a digest of its path, shape, dtype and content."""
    forms = ((f"{place}: {tuple(t.shape)} {t.dtype}", place, t) for place, t in tensors(tree))
    return {digest(form.encode(), [t]): place for form, place, t in forms}


def without(tree: Any, elsewhere: Collection[str]) -> Any:
    """Returns the tree with marks in place of the tensors at some paths."""
    return _mapped(tree, lambda leaf, at: {_ELSEWHERE: at} if at in elsewhere else leaf)


def whole(tree: Any, elsewhere: Mapping[str, Tensor]) -> Any:
    """Returns the tree with the tensors in place of its marks.

    Raises:
        KeyError: a tensor is missing.
    """
    return _mapped(tree, lambda leaf, _: elsewhere[leaf[_ELSEWHERE]] if _marks(leaf) else leaf)


def _mapped(tree: Any, change: Callable[[Any, str], Any], place: str = "") -> Any:
    """Returns the tree with each leaf replaced by `change(leaf, path)`."""
    if isinstance(tree, dict) and not _marks(tree):
        new = copy.copy(tree)  # keeps `_metadata`, a model's versions
        new.update({k: _mapped(item, change, f"{place}/{k!r}") for k, item in tree.items()})
        return new
    if type(tree) in (list, tuple):
        items = enumerate(tree)
        return type(tree)([_mapped(item, change, f"{place}/{k!r}") for k, item in items])
    return change(tree, place)


def _marks(tree: Any) -> bool:
    return isinstance(tree, dict) and _ELSEWHERE in tree
