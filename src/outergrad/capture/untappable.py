"""Detection of forwards that cannot be tapped, which run the layer's own class and plain autograd.

A tap is an `autograd.Function` around ordinary tensors. Tracers would record it in their graph,
transforms of `torch.func` and forward-mode AD reject it, and rows cannot be cut from nested or
sparse tensors. The parameter gradients that autograd then computes are shared dense.

A tensor of a subclass may be tapped if the subclass only adds metadata to a tensor, as MONAI's
`MetaTensor` does (`Annotating`).
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
    """True if the forward is traced or only propagates shapes, so that nothing is trained.

    That is the case in `torch.jit.trace`, `torch.export`, `torch.fx.symbolic_trace`, `make_fx` and
    with fake tensors. Only this thread is checked, as another one may train meanwhile.
    """
    if torch._C._is_tracing():
        return True
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACERS)):
        return True
    if not is_fx_symbolic_tracing():
        return False
    return any(isinstance(leaf, Proxy) for leaf in tree_leaves((args, kwargs)))


def is_transformed() -> bool:
    """True inside a transform of `torch.func` or in forward-mode AD."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_vmapped() -> bool:
    """True inside `torch.vmap`, where tensors lack the mapped dimension."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() == _functorch.TransformType.Vmap for level in stack)


def may_be_tapped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a forward with these arguments may go through taps."""
    values = (*args, *kwargs.values()) if kwargs else args
    return not is_transformed() and all(map(is_ordinary, values))


def is_ordinary(value: Any) -> bool:
    """True if no tensor in a value is nested, sparse or of a subclass other than a parameter."""
    kind = type(value)
    if kind in _ORDINARY:
        return value.layout is torch.strided and not value.is_nested
    if isinstance(value, tuple | list):
        return all(map(is_ordinary, value))
    if isinstance(value, Mapping):
        return all(map(is_ordinary, value.values()))
    return not isinstance(value, Tensor)


def why_untappable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the reason why `may_be_tapped` is false, in words."""
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
    """True if a tensor is of a subclass that only adds metadata."""
    return type(t) not in _ORDINARY and annotates(type(t))


def plain(t: Tensor) -> Tensor:
    """Returns an annotated tensor as a plain one in the same memory; others unchanged."""
    if not is_annotated(t):
        return t
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(t, Tensor)


def copied(t: Tensor) -> Tensor:
    """Returns a plain copy of an annotated tensor, as a tap cannot be put on a view."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.clone(t)


def annotated_as(t: Tensor, like: Tensor) -> Tensor:
    """Returns a plain tensor as one of another's subclass, with the metadata of that one."""
    with torch._C.DisableTorchFunctionSubclass():
        made = Tensor.as_subclass(t, type(like))
    vars(made).update(vars(like))
    return made


class Annotating:
    """Decides per tensor subclass if a layer computes with it as with plain tensors.

    Subclasses with a `__torch_dispatch__` of their own (DTensor, masked and quantized tensors) are
    never tapped. Subclasses with Tensor's `__torch_function__` always are. One with its own
    `__torch_function__` (MetaTensor, which propagates an image's position) may do anything: the
    layer runs once with it and once with plain tensors, and is tapped if the outputs are equal.

    Args:
        same: returns true if the layer computes the same with a forward's arguments and with plain
            ones; None if the layer draws random numbers.
    """

    def __init__(self, same: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None) -> None:
        self._same = same
        self._found: dict[type, bool] = {}

    def may_be_tapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a forward with these arguments may go through taps."""
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
    """True if two outputs are tensors that are equal up to rounding, NaN to NaN."""
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return False
    a, b = plain(found), plain(expected)
    within = 1e-4 if b.dtype in (torch.float32, torch.float64) else 1e-2
    return a.shape == b.shape and torch.allclose(
        a, b.to(a.dtype), rtol=within, atol=within * _largest(b), equal_nan=True
    )


def as_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the arguments with plain tensors in place of annotated ones."""
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
    """True if a selective checkpoint may keep an operator's output, and needs it unchanged.

    It compares the tensor's version counter, which a tap raises by marking the tensor dirty.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def in_functional_call() -> bool:
    """True inside `torch.func.functional_call`, which substitutes tensors for parameters."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None
