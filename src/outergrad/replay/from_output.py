"""Derivatives of elementwise functions, computed from their outputs, and of changes of shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Derivative = Callable[[Any, Tensor], Tensor]
"""Maps a module and its output to the elementwise derivative."""

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


def _between(a: Tensor, low: float, high: float) -> Tensor:
    return ((a > low) & (a < high)).to(a.dtype)


def _above(a: Tensor, slope: Tensor, one: float = 1.0) -> Tensor:
    return torch.where(a > 0, torch.full_like(a, one), slope)


_DERIVATIVES: dict[type[nn.Module], Derivative] = {
    nn.ReLU: lambda module, a: (a > 0).to(a.dtype),
    nn.LeakyReLU: lambda module, a: _above(a, torch.full_like(a, module.negative_slope)),
    nn.ReLU6: lambda module, a: _between(a, 0.0, 6.0),
    nn.Hardtanh: lambda module, a: _between(a, module.min_val, module.max_val),
    nn.Hardsigmoid: lambda module, a: _between(a, 0.0, 1.0) * (1 / 6),
    nn.ELU: lambda module, a: _above(a, a + module.alpha),
    nn.CELU: lambda module, a: _above(a, a / module.alpha + 1),
    nn.SELU: lambda module, a: _above(a, a + _SELU_SCALE * _SELU_ALPHA, _SELU_SCALE),
    nn.Softplus: lambda module, a: -torch.expm1(-module.beta * a),
    nn.Sigmoid: lambda module, a: a * (1 - a),
    nn.Tanh: lambda module, a: 1 - a * a,
    nn.LogSigmoid: lambda module, a: -torch.expm1(a),
    nn.Softsign: lambda module, a: (1 - a.abs()).square(),
    nn.Identity: lambda module, a: torch.ones_like(a),
}
_RESHAPING = (nn.Flatten, nn.Unflatten)


def is_known(module: nn.Module) -> bool:
    """True if the output determines the derivative, which needs an invertible function there."""
    if isinstance(module, nn.LeakyReLU):
        return module.negative_slope > 0
    if isinstance(module, nn.ELU | nn.CELU):
        return module.alpha > 0
    return type(module) in (*_DERIVATIVES, *_RESHAPING)


def reshapes(module: nn.Module) -> bool:
    """True if the module changes at most the shape."""
    return type(module) in _RESHAPING or type(module) is nn.Identity


def delta_before(module: nn.Module, a: Tensor, d: Tensor) -> Tensor:
    """Returns the delta of an elementwise function's input, given that of its output.

    Args:
        module: a module that `is_known`.
        a: output of the module.
        d: delta of the output, with as many elements.
    """
    if type(module) in _RESHAPING:
        return d
    return _DERIVATIVES[type(module)](module, a).view(d.shape) * d
