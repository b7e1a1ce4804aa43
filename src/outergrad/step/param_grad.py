"""The one place that writes `param.grad`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


@torch.no_grad()
def add(params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """`param.grad += gradient`."""
    for name, gradient in gradients.items():
        p = params[name]
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad.add_(gradient)


@torch.no_grad()
def overwrite(params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """`param.grad = gradient`, in place where there is one: the gradients are views of buffers."""
    for name, gradient in gradients.items():
        p = params[name]
        if p.grad is None:
            p.grad = gradient.clone()
        else:
            p.grad.copy_(gradient)


@torch.no_grad()
def scale(params: Iterable[Tensor], factor: float) -> None:
    """`param.grad *= factor`, where there is one."""
    for p in params:
        if p.grad is not None:
            p.grad.mul_(factor)


@torch.no_grad()
def zero(params: Iterable[Tensor]) -> None:
    """`param.grad = 0`, in place, where there is one."""
    for p in params:
        if p.grad is not None:
            p.grad.zero_()


def drop(params: Iterable[Tensor]) -> None:
    """`param.grad = None`: nobody applies it by mistake."""
    for p in params:
        p.grad = None
