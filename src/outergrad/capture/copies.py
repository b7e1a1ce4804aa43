"""A parameter as one copy per sample, so that autograd has its gradient by sample.

The model's code computes with a `Copies` as with the parameter: it has the parameter's shape.
Where it meets a tensor of samples, sample b meets copy b, and what comes out is an ordinary tensor
of samples. Where it meets none, every copy goes the same way. What mixes the two otherwise is
refused: nothing is ever attributed to a sample by guess.

Letters: B samples, `s` the shape that the model's code sees.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

REMEDY = (
    "freeze it (requires_grad_(False)), make it og.Local(), or give its module a rule "
    "(docs/extending.md)"
)

_FACTS = frozenset(
    {"device", "dim", "dtype", "element_size", "get_device", "is_complex", "is_contiguous"}
    | {"is_cpu", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "is_mps", "is_nested"}
    | {"is_quantized", "is_sparse", "itemsize", "layout", "ndim", "ndimension", "nelement"}
    | {"numel", "requires_grad", "shape", "size", "stride", "__len__"}
)
"""Attributes and methods that tell about a tensor, not about its values."""
_VIEWS = frozenset({"T", "mT", "H", "mH"})
"""Attributes that are tensors."""
_BROADCASTING = frozenset(
    {"add", "addcdiv", "addcmul", "div", "divide", "lerp", "maximum", "minimum", "mul", "multiply"}
    | {"pow", "rsub", "scaled_dot_product_attention", "sub", "subtract", "true_divide", "truediv"}
    | {"where"}
)
"""Functions that compute each sample of their result from the same sample of what they are given,
after broadcasting; as `_root` gives their names."""
_JOINING = frozenset({"cat", "concat", "concatenate"})
_AS_OTHERS = frozenset({"expand_as", "reshape_as", "to", "type_as", "view_as"})
"""Functions that take the shape or the dtype alone of their second argument."""


class Copies(Tensor):
    """One copy of a parameter per sample, (B, *s), which passes for a tensor of shape s.

    Args:
        copies_B: the copies, (B, *s).
        param: full name of the parameter, for errors.
    """

    copies_B: Tensor
    param: str

    def __new__(cls, copies_B: Tensor, param: str) -> Copies:
        """Makes a tensor without memory of its own."""
        about: Any = {"dtype": copies_B.dtype, "device": copies_B.device}
        about["requires_grad"] = copies_B.requires_grad
        made = Tensor._make_wrapper_subclass(cls, copies_B.shape[1:], **about)
        made.copies_B, made.param = copies_B, param
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Says what it is; its values have no place in a line."""
        return f"Copies({self.param!r}, {tuple(self.copies_B.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes a function by sample, or refuses to.

        Raises:
            RuntimeError: what the function makes of each sample is not known.
        """
        call = _Call(func, args, kwargs or {})
        if call.name in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **call.kwargs)
        return call()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses what did not come through `__torch_function__`.

        Raises:
            RuntimeError: always.
        """
        raise _Call(func, args, kwargs or {}).refused("which the library cannot follow")


def copied(t: Tensor, samples: int) -> Tensor:
    """Returns a tensor once per sample, (B, *s), in memory of its own and without a graph."""
    return t.detach().expand(samples, *t.shape).clone(memory_format=torch.contiguous_format)


class _Call:
    """One call of a function of torch with at least one `Copies` among its arguments."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = getattr(func, "__name__", str(func))
        if self.name == "__get__":
            self.name = func.__self__.__name__
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._copies = [leaf for leaf in leaves if isinstance(leaf, Copies)]
        self._others = [leaf for leaf in leaves if not isinstance(leaf, Copies)]
        self._total = len(self._copies[0].copies_B)

    def __call__(self) -> Any:
        """Computes the function."""
        self._check()
        if self._total == 1:  # all is of the one sample
            return self._with(lambda copies: copies.copies_B[0])
        composed = _COMPOSED.get(self.func)
        if composed is not None and composed.takes(self.args, self.kwargs):
            return composed.function(*self.args, **self.kwargs)
        of_samples = [t for t in self._others if _is_computed(t)]
        if not of_samples or (self.name in _AS_OTHERS and isinstance(self.args[0], Copies)):
            return self._each()
        odd = next((t for t in of_samples if t.shape[:1] != (self._total,)), None)
        if odd is not None:
            raise self.refused(
                f"with a tensor of shape {tuple(odd.shape)}, whose first dimension does not count "
                f"the {self._total} samples"
            )
        return self._by_sample(of_samples)

    def _check(self) -> None:
        """Raises for what would change the copies, or read more than their values."""
        if _changes(self.name) and isinstance(self.args[0], Copies):
            raise self.refused("in place")
        is_attribute = getattr(self.func, "__name__", "") == "__get__"
        if is_attribute and self.name not in _VIEWS:
            raise self.refused(f"as .{self.name}")

    def _by_sample(self, of_samples: list[Tensor]) -> Tensor:
        """Lets sample b of tensors of samples meet copy b."""
        rank, root = max(t.dim() for t in of_samples), _root(self.name)
        joins = root in _JOINING
        if not (joins or root in _BROADCASTING) or any(t.dim() != rank for t in of_samples):
            raise self.refused("with tensors of samples, in a way that is not elementwise")
        if joins and self._joins_samples(rank):
            raise self.refused("along the dimension of the samples")
        return self._with(lambda copies: self._aligned(copies, rank, joins=joins))

    def _joins_samples(self, rank: int) -> bool:
        """True if it joins tensors along the dimension of the samples."""
        dim = self.kwargs.get("dim", self.kwargs.get("axis", (*self.args, 0)[1]))
        return dim in (0, -rank)

    def _aligned(self, copies: Copies, rank: int, *, joins: bool) -> Tensor:
        """Returns what sample b sees in place b of the first dimension, a tensor of that rank."""
        copies_B, shape = copies.copies_B, copies.copies_B.shape[1:]
        if len(shape) < rank and not joins:
            return copies_B.reshape(self._total, *[1] * (rank - 1 - len(shape)), *shape)
        if len(shape) == rank and shape[0] == 1 and not joins:
            return copies_B.squeeze(1)
        if len(shape) == rank and shape[0] == self._total:  # expanded over the samples
            return copies_B.diagonal().movedim(-1, 0)
        raise self.refused(f"as a tensor of shape {tuple(shape)}, beside samples of rank {rank}")

    def _each(self) -> Any:
        """Computes the same of every copy."""
        leaves, spec = tree_flatten((self.args, self.kwargs))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Copies)]

        def of_one(*copies: Tensor) -> Any:
            filled = list(leaves)
            for place, one in zip(places, copies, strict=True):
                filled[place] = one
            args, kwargs = tree_unflatten(filled, spec)
            return self.func(*args, **kwargs)

        try:
            made = torch.vmap(of_one)(*(copies.copies_B for copies in self._copies))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise self.refused(f"which cannot be computed by sample ({error})") from error
        return tree_map_only(Tensor, lambda t: Copies(t, self._copies[0].param), made)

    def _with(self, instead: Callable[[Copies], Tensor]) -> Any:
        """Computes the function with tensors in place of the copies."""
        args, kwargs = tree_map_only(Copies, instead, (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def refused(self, how: str) -> RuntimeError:
        """Returns the error that says that a parameter's gradient by sample is not known."""
        return RuntimeError(
            f"{self._copies[0].param!r} is used by {self.name}() {how}, and the transform needs "
            f"the gradient of each sample: {REMEDY}"
        )


def _root(name: str) -> str:
    """Returns the name of a function without underscores, and of an operator without r or i."""
    root = name.strip("_")
    reflected = name.startswith("__") and root[:1] in ("i", "r") and root[1:] in _BROADCASTING
    return root[1:] if reflected else root


def _changes(name: str) -> bool:
    """True if a function of this name changes its first argument."""
    if name.endswith("__"):
        root = name.strip("_")
        return root == "setitem" or (root[:1] == "i" and _root(name) != root)
    return name.endswith("_")


def _is_computed(t: Tensor) -> bool:
    """True if a tensor was computed from samples: autograd tells it from a buffer."""
    return t.requires_grad and not isinstance(t, nn.Parameter)


# -- functions of several steps, each of which a `Copies` knows ------------------------------------


class _Composed:
    """A function, in steps of which each is elementwise in the copies.

    Args:
        function: of the same signature.
        params: names of its parameters that may be copies.
    """

    def __init__(self, function: Callable[..., Tensor], *params: str) -> None:
        self.function, self._params = function, params
        self._signature = signature(function)

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if nothing else is a `Copies`."""
        given = self._signature.bind(*args, **kwargs).arguments
        return all(n in self._params for n, value in given.items() if isinstance(value, Copies))


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _by_channel(t: Tensor | None, like: Tensor) -> Tensor | None:
    """Returns a vector of channels in the shape that broadcasts with (B, C, ...)."""
    return None if t is None else t.reshape(-1, *[1] * (like.dim() - 2))


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _affine(F.layer_norm(input, normalized_shape, eps=eps), weight, bias)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _affine(F.rms_norm(input, normalized_shape, eps=eps), weight, None)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    y = F.group_norm(input, num_groups, eps=eps)
    return _affine(y, _by_channel(weight, y), _by_channel(bias, y))


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    about = {"use_input_stats": use_input_stats, "momentum": momentum, "eps": eps}
    y = F.instance_norm(input, running_mean, running_var, **about)  # type: ignore[arg-type]
    return _affine(y, _by_channel(weight, y), _by_channel(bias, y))


def _linear(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(input, weight) + bias


def _conv(function: Callable[..., Tensor]) -> _Composed:
    def with_bias(
        input: Tensor, weight: Tensor, bias: Tensor, *about: Any, **others: Any
    ) -> Tensor:
        y = function(input, weight, None, *about, **others)
        return _affine(y, None, _by_channel(bias, y))

    return _Composed(with_bias, "bias")


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    return torch.where(input > 0, input, _affine(input, _by_channel(weight, input), None))


_COMPOSED: dict[Any, _Composed] = {
    F.layer_norm: _Composed(_layer_norm, "weight", "bias"),
    F.rms_norm: _Composed(_rms_norm, "weight"),
    F.group_norm: _Composed(_group_norm, "weight", "bias"),
    F.instance_norm: _Composed(_instance_norm, "weight", "bias"),
    F.linear: _Composed(_linear, "bias"),
    F.prelu: _Composed(_prelu, "weight"),
    **{function: _conv(function) for function in (F.conv1d, F.conv2d, F.conv3d)},
}
