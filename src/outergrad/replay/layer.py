"""Layers of a chain: which modules qualify, their forward and their backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from outergrad.replay.from_output import is_known, reshapes

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
