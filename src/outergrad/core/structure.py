"""Arguments of a module as plain values and a list of tensors, and back; no pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Structure = Any
"""Values that JSON can hold: a tensor is {"t": its index}, a container {its kind: its items}."""


def flattened(value: Any) -> tuple[Structure, list[Tensor]]:
    """Separates nested arguments into a structure and tensors; a repeated tensor is listed once.

    Raises:
        TypeError: a value among them cannot be sent.
    """
    tensors: list[Tensor] = []
    return _taken_apart(value, tensors), tensors


def rebuilt(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `flattened`."""
    if not isinstance(structure, Mapping):
        return structure
    ((kind, content),) = structure.items()
    if kind == "t":
        return tensors[content]
    if kind == "dict":
        return {key: rebuilt(item, tensors) for key, item in content.items()}
    return _CONTAINERS[kind]([rebuilt(item, tensors) for item in content])


def exchanged(value: Any, new: Mapping[int, Tensor]) -> Any:
    """Replaces the tensors in a value, by `id` of the original; mappings keep their class."""
    if isinstance(value, Tensor):
        return new[id(value)]
    if isinstance(value, Mapping):
        items = {key: exchanged(item, new) for key, item in value.items()}
        return items if type(value) is dict else _of_class(value, items)
    for kind, of_kind in _KINDS.items():
        if type(value) is of_kind:
            return _CONTAINERS[kind]([exchanged(item, new) for item in value])
    return value


def _of_class(value: Any, items: Mapping[str, Any]) -> Any:
    """Copy of a mapping with other items, of the same class: some outputs are dataclasses, too."""
    made = copy(value)
    for key, item in items.items():
        made[key] = item
    return made


def _taken_apart(value: Any, tensors: list[Tensor]) -> Structure:
    if isinstance(value, Tensor):
        return {"t": _place(value, tensors)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _taken_apart(item, tensors) for key, item in value.items()}}
    for kind, of_kind in _KINDS.items():
        if type(value) is of_kind:
            return {kind: [_taken_apart(item, tensors) for item in value]}
    kind = type(value).__name__
    told = f"an object of type {kind}, which cannot be sent"
    if kind.endswith("Cache"):
        remedy = "call the model with use_cache=False, or set use_cache=False in its config"
        raise TypeError(f"{told}: {remedy}")
    raise TypeError(f"{told}; pass tensors, numbers, text, None, lists, tuples or dicts of them")


def _place(tensor: Tensor, tensors: list[Tensor]) -> int:
    known = next((i for i, t in enumerate(tensors) if t is tensor), len(tensors))
    if known == len(tensors):
        tensors.append(tensor)
    return known


_KINDS: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "size": torch.Size,
    "packed": PackedSequence,
}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "size": torch.Size,
    "packed": lambda items: PackedSequence(*items),
}
