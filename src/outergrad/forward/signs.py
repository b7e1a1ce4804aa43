"""Random signs that every site can draw again from a few words."""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

from outergrad.messages.raw import digest


def signs(shape: tuple[int, ...], like: Tensor, *words: int) -> Tensor:
    """Returns independent signs, +1 and -1, in the type and on the device of a tensor.

    They are drawn on the host as whole numbers, so that any two machines draw the same. With
    v of such signs E[v vᵀ] = 1 as for normal numbers, and ‖v‖² is a constant, which makes the
    variance of an estimate (vᵀg) v the least: (d - 1) ‖g‖² instead of (d + 1) ‖g‖².

    Args:
        shape: Shape of the result.
        like: Tensor of a floating type.
        words: Whole numbers that say which signs; other words give independent ones.
    """
    generator = torch.Generator().manual_seed(digest(repr(tuple(map(index, words))).encode()))
    bits = torch.randint(0, 2, shape, dtype=torch.int8, generator=generator)
    return bits.to(like.device).to(like.dtype).mul_(2).sub_(1)
