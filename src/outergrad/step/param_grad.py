"""All writes to `param.grad`, in the memory layout that autograd gives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def put(p: Tensor, gradient: Tensor) -> None:
    """`param.grad = gradient`, in the parameter's memory layout.

    The rule is that of PyTorch's `AccumulateGrad`: the strides of the parameter, if its elements
    fill its memory without gaps and overlaps; else contiguous. PyTorch's fused optimizers go
    through the memory of both, and would mix up the elements of gradients with other strides.
    """
    if not (gradient.is_contiguous() and p.is_contiguous()):
        gradient = _laid_out(gradient, p)
    p.grad = gradient


@torch.no_grad()
def _laid_out(gradient: Tensor, p: Tensor) -> Tensor:
    """Returns the gradient, or a copy if its layout is not the one that autograd gives."""
    if not _is_dense(p):
        return gradient.contiguous()
    if gradient.stride() == p.stride():
        return gradient
    return torch.empty_like(p, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _is_dense(t: Tensor) -> bool:
    """True if its elements fill its memory without gaps and overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@torch.no_grad()
def add(params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """`param.grad += gradient`."""
    for name, gradient in gradients.items():
        p = params[name]
        if p.grad is not None:
            p.grad.add_(gradient)
        elif gradient.is_contiguous() and p.is_contiguous():  # `put` inlined
            p.grad = gradient
        else:
            put(p, gradient)


@torch.no_grad()
def overwrite(params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """`param.grad = gradient`, always by copy: the gradients are views of buffers."""
    pairs = [(params[name], gradient) for name, gradient in gradients.items()]
    there = [(p.grad, gradient) for p, gradient in pairs if p.grad is not None]
    if there:
        old, new = zip(*there, strict=True)
        torch._foreach_copy_(old, new)  # type: ignore[attr-defined]
    for p, gradient in pairs:
        if p.grad is None:
            put(p, gradient.clone())


def replace(params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """`param.grad = gradient`, without a copy: the gradient is the loop's from then on."""
    for name, gradient in gradients.items():
        p = params[name]
        if gradient.is_contiguous() and p.is_contiguous():  # `put` inlined
            p.grad = gradient
        else:
            put(p, gradient)


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
    """`param.grad = None`, so that nobody applies it by mistake."""
    for p in params:
        p.grad = None
