"""Forwards that cannot be tapped: the layer computes as its own class does, autograd the rest.

A tap is an `autograd.Function` around ordinary tensors. Tracers would write it into their graph,
transforms of `torch.func` and forward-mode AD refuse it, and rows cannot be cut from nested or
sparse tensors. The gradients that autograd then has for parameters are shared as such.

A tensor of a subclass may be tapped if the subclass only adds to a tensor what is said about it,
as MONAI's `MetaTensor` does (`Annotating`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.utils import stateless
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from outergrad.capture.engine import untraced
from outergrad.messages.raw import ORDINARY, annotates

_MODES = torch._C._TorchDispatchModeKey
_TRACERS = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)
_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
_ORDINARY = ORDINARY
_SELECTIVE = (_checkpoint._CachingTorchDispatchMode, _checkpoint._CachedTorchDispatchMode)


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


def why_untappable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """In words, what stands in the way of `may_be_tapped`."""
    if is_transformed():
        return "it runs inside a transform of torch.func or in forward-mode AD"
    others = [t for t in _tensors(args, kwargs) if not is_ordinary(t)]
    t = others[0] if others else None
    if t is None:
        return "of what it is called with"
    if _is_nested(t):
        return "what it is called with is nested"
    if t.layout is not torch.strided:
        return "what it is called with is sparse"
    return (
        f"what it is called with is a {type(t).__name__}, a subclass that computes in its own way"
    )


def is_annotated(t: Tensor) -> bool:
    """Whether it is of a subclass that only says something about it."""
    return type(t) not in _ORDINARY and annotates(type(t))


def plain(t: Tensor) -> Tensor:
    """The same tensor without the subclass that annotates it."""
    if not is_annotated(t):
        return t
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(t, Tensor)


def copied(t: Tensor) -> Tensor:
    """A plain copy of an annotated tensor, which itself is a view: a tap cannot stand on one."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.clone(t)


def annotated_as(t: Tensor, like: Tensor) -> Tensor:
    """A plain tensor as one of another's subclass, about which the same is said."""
    with torch._C.DisableTorchFunctionSubclass():
        made = Tensor.as_subclass(t, type(like))
    vars(made).update(vars(like))
    return made


class Annotating:
    """Whether a layer computes with tensors of subclasses as with plain ones.

    A class with a `__torch_dispatch__` of its own (DTensor, masked and quantized tensors) never
    does. One with Tensor's `__torch_function__` always does. One with its own (MetaTensor, which
    carries a picture's position along) may do anything: the layer computes once both ways, and is
    tapped if the numbers are the same.

    Args:
        same: whether the layer computes the same with a forward's arguments and with plain ones;
            None where that would draw random numbers.
    """

    def __init__(self, same: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None) -> None:
        self._same = same
        self._found: dict[type, bool] = {}

    def may_be_tapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a forward with these arguments may go through taps."""
        tensors = _tensors(args, kwargs)
        kinds = {type(t) for t in tensors} - _ORDINARY
        fits = all(t.layout is torch.strided and not _is_nested(t) for t in tensors)
        if is_transformed() or not (fits and all(map(annotates, kinds))):
            return False
        unknown = {kind for kind in kinds if _has_own_function(kind)} - self._found.keys()
        if unknown:
            same = self._same is not None and self._same(args, kwargs)
            self._found.update(dict.fromkeys(unknown, same))
        return all(self._found.get(kind, True) for kind in kinds)


def same_numbers(found: Any, expected: Any) -> bool:
    """Whether two outputs are the same but for rounding; NaN is the same as NaN."""
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return False
    a, b = plain(found), plain(expected)
    within = 1e-4 if b.dtype in (torch.float32, torch.float64) else 1e-2
    return a.shape == b.shape and torch.allclose(
        a, b.to(a.dtype), rtol=within, atol=within * _largest(b), equal_nan=True
    )


def as_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments without subclasses that annotate."""
    return tree_map_only(Tensor, plain, (args, kwargs))


def _largest(t: Tensor) -> float:
    finite = t[t.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _is_nested(t: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return t.is_nested


def _has_own_function(kind: type) -> bool:
    own = vars(next(c for c in kind.__mro__ if "__torch_function__" in vars(c)))
    usual = (vars(Tensor)["__torch_function__"], torch._C._disabled_torch_function_impl)
    return own["__torch_function__"] not in usual


def keeps_products() -> bool:
    """Whether a selective checkpoint may keep what an operator returns, and wants it unchanged.

    It remembers the version of the tensor, which a tap raises where it marks it as its output.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def in_functional_call() -> bool:
    """Whether `torch.func.functional_call` runs, which puts others in the place of parameters."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None
