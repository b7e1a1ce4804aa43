"""Convolutions: a linear layer over the patches of the padded input, per group."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.types import Call, Factors, Slot
from outergrad.layers._common import detached, is_plain, join

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvRule:
    """`nn.Conv1d/2d/3d` with any stride, padding and its modes, dilation and groups."""

    owns: tuple[str, ...] = ()
    traceable: bool = True
    relies_on: tuple[str, ...] = ("forward", "_conv_forward")

    def objection(self, module: nn.Module) -> str | None:
        """Parametrised weights are no leaves."""
        return None if is_plain(module, "weight") else "its weight is computed from others"

    def slots(self, module: Conv, name: str) -> list[Slot]:
        """One: I is a patch (channels of a group x kernel), O the output channels of a group."""
        bias = None if module.bias is None else join(name, "bias")
        outputs = module.out_channels // module.groups
        inputs = math.prod(module.weight.shape[1:])
        weight = join(name, "weight")
        groups, cut = module.groups, math.prod(module.kernel_size) > 1
        return [Slot(name, weight, outputs, inputs, bias=bias, groups=groups, patches=cut)]

    def forward(self, module: Conv, tap: TapFn, input: Tensor) -> Tensor:
        """As the module's own; only the input is kept, patches are cut in backward."""
        batch = _batched(module, input)
        y = module._conv_forward(batch, module.weight.detach(), detached(module.bias))
        tapped = tap(y, batch)
        return tapped if batch is input else tapped.squeeze(0)

    def rows(self, module: Conv, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Batch x output positions."""
        x = args[0] if args else kwargs["input"]
        return [_batch(module, x) * math.prod(_output_size(module, x))]

    def factors(self, module: Conv, slot: int, call: Call) -> Factors:
        """Patches (G, N, I) and deltas (G, N, O) with N = batch x positions."""
        d_GNO = (
            call.d.unflatten(1, (module.groups, -1)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)
        )
        return Factors(d_GNO, _patches(module, call.a.to(call.d.dtype)))


def _dimensions(module: Conv) -> int:
    return len(module.kernel_size)


def _batch(module: Conv, x: Tensor) -> int:
    return x.shape[0] if x.dim() == _dimensions(module) + 2 else 1


def _batched(module: Conv, x: Tensor) -> Tensor:
    return x if x.dim() == _dimensions(module) + 2 else x.unsqueeze(0)


def _padding(module: Conv) -> list[int]:
    """Cells before and after each dimension, last dimension first, as `F.pad` takes them."""
    return list(module._reversed_padding_repeated_twice)


def _output_size(module: Conv, x: Tensor) -> list[int]:
    pad, sizes = _padding(module), x.shape[-_dimensions(module) :]
    padded = [n + pad[2 * i] + pad[2 * i + 1] for i, n in enumerate(reversed(sizes))]
    spans = [d * (k - 1) + 1 for k, d in zip(module.kernel_size, module.dilation, strict=True)]
    return [
        (n - span) // stride + 1
        for n, span, stride in zip(reversed(padded), spans, module.stride, strict=True)
    ]


def _patches(module: Conv, x: Tensor) -> Tensor:
    """(G, batch * positions, channels of a group * kernel) from a batched input."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    windows = F.pad(x, _padding(module), mode=mode)
    for i, (size, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        windows = windows.unfold(i + 2, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # (B, C, positions..., kernel...) -> (G, B, positions..., C / G, kernel...)
    n = _dimensions(module)
    grouped = windows.unflatten(1, (module.groups, -1))
    positions, kernel = range(3, 3 + n), range(3 + n, 3 + 2 * n)
    ordered = grouped.permute(1, 0, *positions, 2, *kernel)
    return ordered.flatten(2 + n).flatten(1, 1 + n)
