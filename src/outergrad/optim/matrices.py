"""Matrices among the parameters of a model, as Muon finds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

_NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
"""Modules whose weights are tables or scales, not matrices that a row of features meets."""

_TOGETHER = 1 << 22
"""Elements of matrices of one shape that are made orthonormal at once: small ones gain by it."""


def muon_groups(model: nn.Module, adam: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Returns parameter groups for `Muon`: hidden matrices, stacks of matrices, and all others.

    By Adam go vectors, embeddings, norms, the head (the last `nn.Linear`), the first convolution,
    which reads the input, and parameters whose first dimension of three is 1, as positions are.

    Args:
        model: Model whose trained parameters are listed, each once.
        adam: Further patterns of names that Adam moves, as ``*.position``; as in `fnmatch`.
    """
    others = _left_to_adam(model)
    kernels = {id(m.weight) for m in model.modules() if isinstance(m, _ConvNd)}
    patterns = [*adam]
    found: dict[str, list[tuple[str, nn.Parameter]]] = {"matrices": [], "stacks": [], "others": []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            named = any(fnmatchcase(name, pattern) for pattern in patterns)
            left = named or id(p) in others or not holds_matrices(p)
            stack = p.dim() > 2 and id(p) not in kernels
            found["others" if left else "stacks" if stack else "matrices"].append((name, p))
    rules = {
        "matrices": {"matrices": True},
        "stacks": {"matrices": True, "stacked": True},
        "others": {"matrices": False},
    }
    return [{"params": params, **rules[kind]} for kind, params in found.items() if params]


def _left_to_adam(model: nn.Module) -> set[int]:
    """Returns ids of the parameters of embeddings, norms, the head and the first convolution."""
    found = [m for m in model.modules() if isinstance(m, _NO_MATRICES)]
    found += [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
    found += [m for m in model.modules() if isinstance(m, _ConvNd)][:1]
    return {id(p) for m in found for p in m.parameters(recurse=False)}


def holds_matrices(p: Tensor) -> bool:
    """True if the first dimension and the others together are both larger than 1."""
    if p.dim() < 2 or not p.numel():
        return False
    return min(p.shape[0], p.numel() // p.shape[0]) > 1


def as_matrices(direction: Tensor, stacked: bool) -> Tensor:
    """Returns a matrix (O, I) of a tensor, or with `stacked` the matrices (..., O, I) it holds."""
    return direction if stacked or direction.dim() == 2 else direction.flatten(1)


def of_one_shape(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields parameters of one shape, type and device together, but not too many.

    Parameters without elements, which cannot move, are left out.
    """

    def kind(p: Tensor) -> tuple[str, ...]:
        return str(p.shape), str(p.dtype), str(p.device)

    for _, alike in groupby(sorted(filter(torch.numel, params), key=kind), key=kind):
        found = [*alike]
        size = max(1, _TOGETHER // found[0].numel())
        yield from (found[at : at + size] for at in range(0, len(found), size))
