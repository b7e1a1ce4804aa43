"""Forwards that cannot be tapped: the layer computes as its own class does, autograd the rest.

A tap is an `autograd.Function` around ordinary tensors. Tracers would write it into their graph,
transforms of `torch.func` and forward-mode AD refuse it, and rows cannot be cut from nested or
sparse tensors. The gradients that autograd then has for parameters are shared as such.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.utils import stateless
from torch.utils._pytree import tree_leaves

from outergrad.capture.engine import untraced

_MODES = torch._C._TorchDispatchModeKey
_TRACERS = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)
_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
_ORDINARY = {Tensor, nn.Parameter}


@untraced
def is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the forward is written down or its shapes are found out, and nothing is trained.

    By `torch.jit.trace`, `torch.export`, `torch.fx.symbolic_trace`, `make_fx` or fake tensors; in
    this thread, as another one may train meanwhile.
    """
    if torch._C._is_tracing():
        return True
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACERS)):
        return True
    if not is_fx_symbolic_tracing():
        return False
    return any(isinstance(leaf, Proxy) for leaf in tree_leaves((args, kwargs)))


def is_transformed() -> bool:
    """Whether the forward runs inside a transform of `torch.func` or in forward-mode AD."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_vmapped() -> bool:
    """Whether tensors lack dimensions, because `torch.vmap` goes through them."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() == _functorch.TransformType.Vmap for level in stack)


def may_be_tapped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward with these arguments may go through taps."""
    values = (*args, *kwargs.values()) if kwargs else args
    return not is_transformed() and all(map(is_ordinary, values))


def is_ordinary(value: Any) -> bool:
    """Whether no tensor in it is nested, sparse or of a subclass that computes in its own way."""
    kind = type(value)
    if kind in _ORDINARY:
        return value.layout is torch.strided and not value.is_nested
    if isinstance(value, tuple | list):
        return all(map(is_ordinary, value))
    if isinstance(value, Mapping):
        return all(map(is_ordinary, value.values()))
    return not isinstance(value, Tensor)


def in_functional_call() -> bool:
    """Whether `torch.func.functional_call` runs, which puts others in the place of parameters."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None
