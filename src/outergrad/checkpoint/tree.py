"""States as trees: which of their tensors several sites have alike, and trees without these."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_ELSEWHERE = "outergrad: tensor elsewhere"
"""Key of what stands in a tree for a tensor that is kept beside it."""


def tensors(tree: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every ordinary tensor of a tree of dicts, lists and tuples, by its place."""
    if isinstance(tree, Tensor):
        if tree.layout == torch.strided and not tree.is_complex():
            yield place, tree
    else:
        for where, item in _children(tree, place):
            yield from tensors(item, where)


def digests(tree: Any) -> dict[int, str]:
    """The place of every tensor, by a digest of the place, the form and the content."""
    return {_digest(place, t): place for place, t in tensors(tree)}


def without(tree: Any, elsewhere: Collection[str], place: str = "") -> Any:
    """The tree with marks for the tensors of some places."""
    if isinstance(tree, Tensor):
        return {_ELSEWHERE: place} if place in elsewhere else tree
    return _rebuilt(tree, place, lambda item, where: without(item, elsewhere, where))


def whole(tree: Any, elsewhere: Mapping[str, Tensor]) -> Any:
    """The tree with the tensors that its marks stand for.

    Raises:
        KeyError: one is not there.
    """
    if isinstance(tree, dict) and _ELSEWHERE in tree:
        return elsewhere[tree[_ELSEWHERE]]
    return _rebuilt(tree, "", lambda item, _: whole(item, elsewhere))


def _children(tree: Any, place: str) -> Iterator[tuple[str, Any]]:
    items: Any = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    return ((f"{place}/{key!r}", item) for key, item in items)


def _rebuilt(tree: Any, place: str, change: Callable[[Any, str], Any]) -> Any:
    """A container of the same kind with its items changed; a leaf as it is."""
    changed = [change(item, where) for where, item in _children(tree, place)]
    if isinstance(tree, dict):
        new = copy.copy(tree)  # a model's state has its versions in an attribute
        new.update(zip(tree, changed, strict=True))
        return new
    return type(tree)(changed) if type(tree) in (list, tuple) else tree


def _digest(place: str, t: Tensor) -> int:
    """62 bits, so that it is an int64."""
    found = hashlib.sha256(f"{place}: {tuple(t.shape)} {t.dtype}".encode())
    found.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest()[:8], "big") >> 2
