"""Convolutions as a linear layer over the patches of the padded input, per group."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.transform import SampleRows, Samples
from outergrad.core.types import Call, Factors, Slot
from outergrad.layers._common import detached, input_of, matrix_slot
from outergrad.linalg.outer import widened
from outergrad.linalg.site_gradient import sampled

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvRule:
    """`nn.Conv1d/2d/3d` with any stride, padding and its modes, dilation and groups."""

    owns: tuple[str, ...] = ()
    traceable: bool = True
    relies_on: tuple[str, ...] = ("forward", "_conv_forward")

    def objection(self, module: nn.Module) -> str | None:
        """Returns None: there is no objection to any module."""
        return None

    def slots(self, module: Conv, name: str) -> list[Slot]:
        """Returns one slot; I is channels of a group x kernel, O the output channels of a group."""
        outputs, cut = module.out_channels // module.groups, math.prod(module.kernel_size) > 1
        whole = matrix_slot(module, name)
        return [whole._replace(outputs=outputs, groups=module.groups, patches=cut)]

    def forward(self, module: Conv, tap: TapFn, input: Tensor) -> Tensor:
        """Computes the module's forward; saves only the input, patches are cut in backward."""
        batched = input.dim() == module.weight.dim()
        batch = input if batched else input.unsqueeze(0)
        y = module._conv_forward(batch, module.weight.detach(), detached(module.bias))
        tapped = tap(y, batch, samples=batch.shape[0])
        return tapped if batched else tapped.squeeze(0)

    def rows(self, module: Conv, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Returns batch x output positions."""
        x = input_of(args, kwargs)
        batch = x.shape[0] if x.dim() == module.weight.dim() else 1
        return [batch * math.prod(_output_size(module, x))]

    def factors(self, module: Conv, slot: int, call: Call) -> Factors:
        """Returns patches (G, N, I) and deltas (G, N, O) with N = batch x positions."""
        d_GNO = (
            call.d.unflatten(1, (module.groups, -1)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)
        )
        return Factors(d_GNO, _patches(module, call.a.to(call.d.dtype)))

    def by_sample(self, module: Conv, slot: int, call: Call, samples: Samples) -> SampleRows:
        """Returns the rows of `factors` with the index of each row's sample."""
        return sampled(self.factors(module, slot, call), samples)

    def products(self, module: Conv, slot: int, call: Call) -> tuple[Tensor, Tensor | None]:
        """Returns each sample's product, (B, G, O, I), and with a bias sum of deltas, (B, G, O).

        They are the gradient of a convolution with a group per sample, which needs no patches.
        """
        d, x = widened(call.d), widened(call.a)
        padding, x = _padded(module, x)
        samples, groups, kernel = len(x), module.groups, module.weight.shape[1:]
        weight = module.weight.new_empty(()).to(d.dtype).expand(d.shape[0] * d.shape[1], *kernel)
        about = (module.stride, padding, module.dilation, False, [0] * len(padding))
        wanted = samples * groups, [False, True, False]
        one_d, one_x = (t.reshape(1, -1, *t.shape[2:]) for t in (d, x))
        _, found, _ = torch.ops.aten.convolution_backward(
            one_d, one_x, weight, None, *about, *wanted
        )
        product_BGOI = found.view(samples, groups, module.out_channels // groups, -1)
        if module.bias is None:
            return product_BGOI, None
        return product_BGOI, d.flatten(2).sum(dim=2).unflatten(1, (groups, -1))


def _output_size(module: Conv, x: Tensor) -> list[int]:
    pad = list(module._reversed_padding_repeated_twice)[::-1]
    sizes, windows = x.shape[-len(module.kernel_size) :], _windows(module)
    return [
        (n + before + after - dilation * (size - 1) - 1) // stride + 1
        for n, before, after, (size, stride, dilation) in zip(
            sizes, pad[1::2], pad[::2], windows, strict=True
        )
    ]


def _padded(module: Conv, x: Tensor) -> tuple[list[int], Tensor]:
    """Returns the zeros that a convolution adds itself on both sides, and its input."""
    pads = list(module._reversed_padding_repeated_twice)
    if module.padding_mode == "zeros" and pads[::2] == pads[1::2]:
        return pads[::-2], x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return [0] * len(module.kernel_size), F.pad(x, pads, mode=mode)


def _windows(module: Conv) -> list[tuple[int, int, int]]:
    """Returns kernel size, stride and dilation of every dimension."""
    return list(zip(module.kernel_size, module.stride, module.dilation, strict=True))


def _patches(module: Conv, x: Tensor) -> Tensor:
    """Returns (G, batch * positions, channels of a group * kernel) from a batched input."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    cut = F.pad(x, list(module._reversed_padding_repeated_twice), mode=mode)
    for i, (size, stride, dilation) in enumerate(_windows(module)):
        cut = cut.unfold(i + 2, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # (B, C, positions..., kernel...) -> (G, B, positions..., C / G, kernel...)
    n = len(module.kernel_size)
    grouped = cut.unflatten(1, (module.groups, -1))
    positions, kernel = range(3, 3 + n), range(3 + n, 3 + 2 * n)
    ordered = grouped.permute(1, 0, *positions, 2, *kernel)
    return ordered.flatten(2 + n).flatten(1, 1 + n)
