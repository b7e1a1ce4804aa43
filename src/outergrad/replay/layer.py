"""Layers of a chain: which modules qualify, their forward and their backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

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


ChainLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}


def output(layer: ChainLayer, x: Tensor, params: Mapping[int, Tensor]) -> Tensor:
    """Returns the layer's output for x; `params` maps the id of a parameter to its value."""
    bias = None if layer.bias is None else params[id(layer.bias)]
    weight = params[id(layer.weight)]
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    convolve = _CONVOLUTIONS[type(layer)]
    return convolve(x, weight, bias, *_geometry(layer), layer.groups)


def _geometry(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[Any, Any, Any]:
    return layer.stride, layer.padding, layer.dilation


def backward(
    layer: ChainLayer, a: Tensor, d: Tensor, found: dict[int, Tensor], *, inputs: bool
) -> Tensor:
    """Stores a layer's gradients in `found`; returns the delta of its input if `inputs`."""
    weight, a_d = layer.weight.detach().to(d.dtype), a.to(d.dtype)
    with torch.autocast(d.device.type, enabled=False):
        if isinstance(layer, nn.Linear):
            d_NO, a_NI = d.reshape(-1, d.shape[-1]), a_d.reshape(-1, a.shape[-1])
            found[id(layer.weight)] = d_NO.mT @ a_NI
            if layer.bias is not None:
                found[id(layer.bias)] = d_NO.sum(dim=0)
            return (d @ weight).to(a.dtype) if inputs else d
        zeros, sizes = [0] * len(layer.kernel_size), [layer.out_channels]
        a_d, d_N = (t.view(-1, *t.shape[-weight.dim() + 1 :]) for t in (a_d, d))
        before, of_weight, of_bias = torch.ops.aten.convolution_backward(
            *(d_N, a_d, weight, sizes, *_geometry(layer), False, zeros, layer.groups),
            [inputs, True, layer.bias is not None],
        )
    found[id(layer.weight)] = of_weight
    if layer.bias is not None:
        found[id(layer.bias)] = of_bias
    return before.to(a.dtype).view(a.shape) if inputs else d


def is_batched(layer: ChainLayer, shape: Sequence[int]) -> bool:
    """True if an output of this shape has a batch dimension."""
    return len(shape) >= (2 if isinstance(layer, nn.Linear) else layer.weight.dim())


def is_layer(module: Any) -> TypeGuard[ChainLayer]:
    """True if a layer's gradient follows from its activations and delta."""
    if type(module) is nn.Linear:
        return True
    is_convolution = type(module) in _CONVOLUTIONS
    return is_convolution and module.padding_mode == "zeros" and type(module.padding) is tuple


def has_hooks(module: nn.Module) -> bool:
    """True if a hook is registered on the module."""
    return any(value for key, value in vars(module).items() if key.endswith("_hooks"))


def chains_in(modules: Sequence[nn.Module | None]) -> list[tuple[int, int]]:
    """Returns first and last index of each maximal chain, of two layers or more."""
    chains: list[tuple[int, int]] = []
    first = last = None
    for i, module in enumerate([*modules, None]):
        if module is not None and is_layer(module):
            first, last = (i if first is None else first), i
        elif module is None or not _may_stand_between(module):
            if first is not None and last is not None and last > first:
                chains.append((first, last))
            first = last = None
    return chains


_BETWEEN = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.PReLU),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.Softmax, nn.LogSoftmax, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink),
)
"""Modules that may stand between two layers of a chain, where they are recomputed."""


def _may_stand_between(module: nn.Module) -> bool:
    return is_known(module) or type(module) in _BETWEEN


def _keeps_rows_apart(module: nn.Module) -> bool:
    """True if a module that may stand in a chain never mixes rows of the first dimension."""
    if isinstance(module, nn.Softmax | nn.LogSoftmax):
        return False  # the default dimension depends on the number of dimensions
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    if isinstance(module, nn.Flatten):
        return module.start_dim > 0
    return not isinstance(module, nn.Unflatten) or (isinstance(module.dim, int) and module.dim > 0)


@dataclass(frozen=True)
class Between:
    """Modules between two layers of a chain.

    Attributes:
        modules: the modules, in order.
    """

    modules: tuple[nn.Module, ...]

    @property
    def is_known(self) -> bool:
        """True if the derivative follows from the output: at most one function that computes."""
        functions = [m for m in self.modules if not reshapes(m)]
        return len(functions) <= 1 and all(map(is_known, self.modules))

    @property
    def keeps_rows_apart(self) -> bool:
        """True if each row of the output depends on the same row of the input alone."""
        return all(map(_keeps_rows_apart, self.modules))

    def __call__(self, y: Tensor, params: Mapping[int, Tensor]) -> Tensor:
        """Returns the next layer's activations; `params` maps a parameter's id to its value."""
        for module in self.modules:
            own = {n: params[id(p)] for n, p in module.named_parameters()}
            y = functional_call(module, own, (y,))
        return y
