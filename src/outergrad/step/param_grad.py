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
    pairs = [(params[name], gradient) for name, gradient in gradients.items()]
    there = [(p.grad, gradient) for p, gradient in pairs if p.grad is not None]
    if there:
        old, new = zip(*there, strict=True)
        torch._foreach_copy_(old, new)  # type: ignore[attr-defined]
    for p, gradient in pairs:
        if p.grad is None:
            p.grad = gradient.clone()


def replace(params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """`param.grad = gradient`, which becomes the loop's."""
    for name, gradient in gradients.items():
        params[name].grad = gradient


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
