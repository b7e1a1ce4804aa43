"""Derivatives of elementwise functions from what they returned, and of changes of shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Derivative = Callable[[Any, Tensor], Tensor]
"""Of a module, elementwise at its output."""

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


def _relu(module: nn.Module, a: Tensor) -> Tensor:
    return (a > 0).to(a.dtype)


def _leaky_relu(module: nn.LeakyReLU, a: Tensor) -> Tensor:
    return torch.where(a > 0, 1.0, module.negative_slope).to(a.dtype)


def _clamped(low: float, high: float, slope: float = 1.0) -> Derivative:
    return lambda module, a: ((a > low) & (a < high)).to(a.dtype) * slope


def _hardtanh(module: nn.Hardtanh, a: Tensor) -> Tensor:
    return ((a > module.min_val) & (a < module.max_val)).to(a.dtype)


def _elu(module: nn.ELU, a: Tensor) -> Tensor:
    return torch.where(a > 0, torch.ones_like(a), a + module.alpha)


def _celu(module: nn.CELU, a: Tensor) -> Tensor:
    return torch.where(a > 0, torch.ones_like(a), a / module.alpha + 1)


def _selu(module: nn.SELU, a: Tensor) -> Tensor:
    return torch.where(a > 0, torch.full_like(a, _SELU_SCALE), a + _SELU_SCALE * _SELU_ALPHA)


def _softplus(module: nn.Softplus, a: Tensor) -> Tensor:
    return -torch.expm1(-module.beta * a)


_DERIVATIVES: dict[type[nn.Module], Derivative] = {
    nn.ReLU: _relu,
    nn.LeakyReLU: _leaky_relu,
    nn.ReLU6: _clamped(0.0, 6.0),
    nn.Hardtanh: _hardtanh,
    nn.Hardsigmoid: _clamped(0.0, 1.0, 1 / 6),
    nn.ELU: _elu,
    nn.CELU: _celu,
    nn.SELU: _selu,
    nn.Softplus: _softplus,
    nn.Sigmoid: lambda module, a: a * (1 - a),
    nn.Tanh: lambda module, a: 1 - a * a,
    nn.LogSigmoid: lambda module, a: -torch.expm1(a),
    nn.Softsign: lambda module, a: (1 - a.abs()).square(),
    nn.Identity: lambda module, a: torch.ones_like(a),
}
_RESHAPING = (nn.Flatten, nn.Unflatten)


def is_known(module: nn.Module) -> bool:
    """Whether the derivative follows from the output: the function must be invertible there."""
    kind = type(module)
    if isinstance(module, nn.LeakyReLU):
        return module.negative_slope > 0
    if isinstance(module, nn.ELU | nn.CELU):
        return module.alpha > 0
    return kind in _DERIVATIVES or kind in _RESHAPING


def reshapes(module: nn.Module) -> bool:
    """Whether it only changes the shape."""
    return type(module) in _RESHAPING or type(module) is nn.Identity


def delta_before(module: nn.Module, a: Tensor, d: Tensor) -> Tensor:
    """The delta of an elementwise function's input from that of its output.

    Args:
        module: for which `is_known`.
        a: its output.
        d: delta, of the same number of elements.
    """
    if type(module) in _RESHAPING:
        return d
    return _DERIVATIVES[type(module)](module, a).view(d.shape) * d
