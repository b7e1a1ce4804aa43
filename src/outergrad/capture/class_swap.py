"""Class swaps: a module gets another forward, or reports its calls, and is otherwise unchanged."""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, Generic
from weakref import ref

import torch
from torch import nn

from outergrad.capture.engine import NO_TASK, current_task, itself_untraced, untraced
from outergrad.capture.untappable import is_traced


class ClassSwap:
    """Gives one module a subclass of its class, of the same name, with another forward.

    All state lives in the subclass's forward, not in the module: state_dict, `vars(module)`, copies
    and pickles are those of the plain module.

    Args:
        module: the module.
        forward: called instead of the module's own forward, unless the call is being traced.
        in_graphs: the function that torch.compile traces instead if gradients are enabled; without
            it, the graph breaks and `forward` is called.

    Attributes:
        rests: True while calls outside of graphs go to the module's own forward. A recomputation
            in a backward goes to `forward` all the same.
        rested: True once a forward has run while `rests` was set.
    """

    rests = rested = False

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        in_graphs: Callable[..., Any] | None = None,
    ) -> None:
        self._module, self._plain = module, type(module)
        body = {"forward": _forward(self, self._plain, module, untraced(forward), in_graphs)}
        self._own = module.__class__ = _subclass(self._plain, body)

    def plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        return self._plain.forward(self._module, *args, **kwargs)

    def restore(self) -> None:
        """Gives the module its own class back."""
        _take_out(self._module, self._own, self._plain)


class CallSwap:
    """Gives one module a subclass of its class that reports each call of the module.

    The module's forward, its signature and graphs of torch.compile stay unchanged.

    Args:
        module: the module, held weakly.
        before: called before each call of the module, but not in graphs.
    """

    def __init__(self, module: nn.Module, before: Callable[[], None]) -> None:
        self._module, self._plain = ref(module), type(module)
        body = {"__call__": _call(self._plain, self._module, untraced(before))}
        self._own = module.__class__ = _subclass(self._plain, body)

    def restore(self) -> None:
        """Gives the module its own class back."""
        module = self._module()
        if module is not None:
            _take_out(module, self._own, self._plain)


class StateSwap:
    """Gives one module a subclass of its class that reports when its weights are saved or loaded.

    A note goes with the versions of modules that PyTorch keeps beside a state's tensors, which
    `torch.save` writes, too.

    Args:
        module: the module, held weakly.
        saving: returns the note for a state that is made, None for none.
        loading: called with the note of a state that is about to be loaded, None if it has none.
    """

    def __init__(
        self,
        module: nn.Module,
        saving: Callable[[], int | None],
        loading: Callable[[int | None], None],
    ) -> None:
        self._module, self._plain = ref(module), type(module)
        body = _state_methods(self._plain, self._module, saving, loading)
        self._own = module.__class__ = _subclass(self._plain, body)

    def restore(self) -> None:
        """Gives the module its own class back."""
        module = self._module()
        if module is not None:
            _take_out(module, self._own, self._plain)


_NOTE = "outergrad"


def _state_methods(
    plain: type[nn.Module],
    module: ref[nn.Module],
    saving: Callable[[], int | None],
    loading: Callable[[int | None], None],
) -> Mapping[str, Any]:
    def _save_to_state_dict(
        self: nn.Module, destination: Any, prefix: str, keep_vars: bool
    ) -> None:
        plain._save_to_state_dict(self, destination, prefix, keep_vars)
        note = saving() if self is module() else None
        if note is not None and hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][_NOTE] = note

    def _load_from_state_dict(
        self: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        if self is module():
            loading(local_metadata.get(_NOTE))
        plain._load_from_state_dict(self, state_dict, prefix, local_metadata, *others)

    return {
        "_save_to_state_dict": _save_to_state_dict,
        "_load_from_state_dict": _load_from_state_dict,
    }


def _take_out(module: nn.Module, own: type[nn.Module], plain: type[nn.Module]) -> None:
    """Removes a subclass, also as a base of classes that `parametrize` has derived from it."""
    if type(module) is own:
        module.__class__ = plain
    for above in type(module).__mro__:
        if own in above.__bases__:
            above.__bases__ = tuple(plain if base is own else base for base in above.__bases__)


def _call(
    plain: type[nn.Module], module: ref[nn.Module], before: Callable[[], None]
) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        compiles = torch.compiler.is_dynamo_compiling()
        if self is module() and not compiles and not is_traced(args, kwargs):
            before()
        return plain.__call__(self, *args, **kwargs)

    return itself_untraced(__call__)


def _forward(
    swap: ClassSwap,
    plain: type[nn.Module],
    module: nn.Module,
    instead: Callable[..., Any],
    in_graphs: Callable[..., Any] | None,
) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module:
            return plain.forward(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            if not torch.is_grad_enabled() or torch.compiler.is_exporting():
                return plain.forward(self, *args, **kwargs)
            if in_graphs is not None:
                return in_graphs(*args, **kwargs)
        elif swap.rests and current_task() == NO_TASK:
            swap.rested = True
            return plain.forward(self, *args, **kwargs)
        elif is_traced(args, kwargs):
            return plain.forward(self, *args, **kwargs)
        else:
            return instead(*args, **kwargs)
        from outergrad.capture.tracing import outside_graphs

        return outside_graphs(instead, args, kwargs)

    forward.__wrapped__ = plain.forward  # type: ignore[attr-defined]  # its signature
    return forward


def _subclass(plain: type[nn.Module], body: Mapping[str, Any]) -> type[nn.Module]:
    def __reduce_ex__(self: nn.Module, protocol: int) -> Any:  # noqa: N807
        _, _, *state = plain.__reduce_ex__(self, protocol)  # type: ignore[misc]
        return copyreg._reconstructor, (first, object, None), *state  # type: ignore[attr-defined]

    def __prepare_scriptable__(self: nn.Module) -> Any:  # noqa: N807
        raise RuntimeError(
            "torch.jit.script cannot read the forward of a distributed model: script a copy, "
            "torch.jit.script(copy.deepcopy(model)), or call session.detach() first"
        )

    # A module may be swapped twice: the original class is the first one.
    first = vars(plain).get("_before_swaps", plain)
    same = {
        "_before_swaps": first,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "__prepare_scriptable__": __prepare_scriptable__,
    }
    return _made(plain, {**same, **body})


def is_swappable(module: nn.Module) -> bool:
    """True if the module can be given a subclass of its class."""
    plain = type(module)
    try:
        module.__class__ = _made(plain, {})
    except Exception:  # whatever the class does about it
        return False
    module.__class__ = plain
    return True


def _made(plain: type[nn.Module], body: Mapping[str, Any]) -> type[nn.Module]:
    """Creates a subclass past custom metaclasses and, unless it has slots, `__init_subclass__`.

    These may require arguments, keep a registry of classes, or forbid subclasses.

    Raises:
        TypeError: the class allows no subclass.
    """
    if issubclass(plain, torch.jit.ScriptModule):
        raise TypeError(f"{plain.__name__} runs in TorchScript, by no forward in Python")
    meta: Any = type(plain)
    new: Any = ABCMeta.__new__ if issubclass(meta, ABCMeta) else type.__new__
    teller = next(c for c in plain.__mro__ if "__init_subclass__" in vars(c))
    if teller in (object, Generic):
        return new(meta, plain.__name__, (plain,), dict(body))
    try:
        # Only the bases given at creation are told of a subclass, so the real one is set later.
        own = new(meta, plain.__name__, (nn.Module,), dict(body))
        type.__setattr__(own, "__bases__", (plain,))
    except TypeError:  # a class with slots has another memory layout
        own = new(meta, plain.__name__, (plain,), dict(body))
    return own
