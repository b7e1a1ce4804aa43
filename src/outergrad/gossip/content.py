"""Tensors as the bytes of one letter, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.wire import Plain


def bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of tensors one after another, on the host: a 1-D tensor of uint8.

    The result is a copy, which later changes of the tensors leave as it is.
    """
    found = [t.detach().reshape(-1).to("cpu").view(torch.uint8) for t in tensors]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8)


def tensors_of(content: Tensor, plain: Sequence[Plain], device: torch.device) -> list[Tensor]:
    """Returns the tensors of some shapes and dtypes whose bytes follow each other.

    Raises:
        ValueError: the content is of another length.
    """
    sizes = [nbytes_of([one]) for one in plain]
    if len(content) != sum(sizes):
        raise ValueError(f"a letter of {len(content)} bytes came, where {sum(sizes)} were due")
    parts = zip(content.split(sizes), plain, strict=True)
    # A part may begin at any byte, where a view in a wider dtype may not.
    return [part.clone().view(one.dtype).view(one.shape).to(device) for part, one in parts]


def plain_of(tensors: Sequence[Tensor]) -> list[Plain]:
    """Returns the shapes and dtypes of tensors."""
    return [Plain(tuple(t.shape), t.dtype) for t in tensors]


def nbytes_of(plain: Sequence[Plain]) -> int:
    """Returns the length of a letter of tensors of some shapes and dtypes."""
    return sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in plain)


def hollow(t: Tensor) -> Tensor:
    """Returns a tensor of the same shape, dtype and device that takes no memory."""
    return t.new_empty(()).expand(t.shape)
