"""Helpers that the rules share."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.transform import SampleRows, Samples
from outergrad.core.types import Call, Factors, Slot
from outergrad.linalg.site_gradient import sampled


class LinearProducts:
    """Base of the rules of layers whose products are all those of a linear layer."""

    owns: tuple[str, ...] = ()

    def objection(self, module: Any) -> str | None:
        """Returns None: there is no objection to any module."""
        return None

    def factors(self, module: nn.Module, slot: int, call: Call) -> Factors:
        """Returns input and delta in delta's dtype, which autograd multiplies under autocast."""
        d_GNO = rows_of(call.d, call.d.shape[-1])
        return Factors(d_GNO, rows_of(call.a, call.a.shape[-1]).to(d_GNO.dtype))

    def by_sample(self, module: nn.Module, slot: int, call: Call, samples: Samples) -> SampleRows:
        """Returns the rows of `factors` with the index of each row's sample."""
        return sampled(self.factors(module, slot, call), samples)


def tapped_linear(
    tap: TapFn,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slot: int = 0,
    *,
    samples: int | None = None,
    positions_first: bool = False,
) -> Tensor:
    """Computes `F.linear` through a tap.

    Args:
        tap: the layer's tap.
        x: the input, (..., I); the result is (..., O).
        weight: (O, I).
        bias: (O,), or None.
        slot: index into `Rule.slots`.
        samples: as for `TapFn`; None for the first dimension of x, or 1 if x is a single row.
        positions_first: as for `TapFn`.
    """
    flat_NI = x.reshape(-1, x.shape[-1])  # before the tap, whose output may not be a view
    y_NO = F.linear(flat_NI, weight.detach(), detached(bias))
    if samples is None:
        samples = x.shape[0] if x.dim() > 1 else 1
    tapped = tap(y_NO, flat_NI, slot, samples=samples, positions_first=positions_first)
    return tapped.view(*x.shape[:-1], weight.shape[0])


def matrix_slot(module: Any, name: str, weight: str = "weight", bias: str = "bias") -> Slot:
    """Returns the slot of a whole weight, and of its bias if there is one.

    Args:
        module: the module.
        name: full name of the module.
        weight: attribute name of the weight.
        bias: attribute name of the bias.
    """
    full_bias = None if getattr(module, bias, None) is None else join(name, bias)
    outputs, *inputs = getattr(module, weight).shape
    return Slot(name, join(name, weight), outputs, math.prod(inputs), bias=full_bias)


def samples_of(tap: TapFn) -> int | None:
    """Returns B where a transform tells samples apart, None elsewhere."""
    return getattr(tap, "samples", None)


def layer_of(tap: TapFn) -> str:
    """Returns the full name of the layer where a transform tells samples apart."""
    return getattr(tap, "layer", "")


def is_given(tap: TapFn, t: Tensor) -> bool:
    """True if a tensor is one that the model was called with, where samples are told apart."""
    given = getattr(tap, "is_given", None)
    return given is None or given(t)


def join(prefix: str, name: str) -> str:
    """Returns the full name of a child; the root module's name is empty."""
    return f"{prefix}.{name}" if prefix else name


def detached(parameter: Tensor | None) -> Tensor | None:
    """Returns a parameter without its graph, so that autograd computes no weight gradient."""
    return None if parameter is None else parameter.detach()


def rows_of(t_N_: Tensor, width: int) -> Tensor:
    """Flattens (..., width) to one group of rows, (1, N, width)."""
    return t_N_.reshape(1, -1, width)


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the first argument of a forward, also if it was passed as `input=`."""
    return args[0] if args else kwargs["input"]
