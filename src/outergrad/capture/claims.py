"""Sessions' claims on parameters, and hooks of others, deferred until the gradient is the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from outergrad.capture.engine import untraced

_Hooks = MutableMapping[int, Callable[..., Any]]


class Claim:
    """A parameter hook that marks the parameter as a session's and keeps the session alive.

    Python's garbage collector traverses hooks of `register_hook`, so parameter and owner are freed
    together when nothing else refers to either.

    Args:
        parameter: requires a gradient.
        owner: the object that the hook keeps alive.
    """

    def __init__(self, parameter: nn.Parameter, owner: Any) -> None:
        self.owner = owner
        self._handles: list[RemovableHandle] = [parameter.register_hook(self._before)]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, gradient: Tensor | None) -> None:
        """Called before a backward accumulates a gradient; does nothing here."""


def is_claimed(p: nn.Parameter) -> bool:
    """True if a session has claimed the parameter."""
    hooks = (p._backward_hooks or {}).values()
    return any(isinstance(getattr(hook, "__self__", None), Claim) for hook in hooks)


def unclaim(p: nn.Parameter) -> None:
    """Removes a session's hooks from a parameter."""
    for hook in list((p._backward_hooks or {}).values()):
        claim = getattr(hook, "__self__", None)
        if isinstance(claim, Claim):
            claim.remove()


class _Held:
    """Placeholder for a hook that autograd would call too early.

    It does not refer to the parameter: the garbage collector does not traverse hooks of this kind,
    so a cycle through one would never be freed.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *_: Any) -> None:
        """Does nothing: `run` calls the hook later."""

    def run(self, parameter: nn.Parameter) -> None:
        self.hook(parameter)


class _HeldOfNode(_Held):
    """Placeholder for a hook of the accumulator node, called with a node hook's arguments."""

    def run(self, parameter: nn.Parameter) -> None:
        self.hook((), (parameter.grad,))


class ReadyHook:
    """A post-accumulate hook that holds its claim weakly.

    The garbage collector does not traverse post-accumulate hooks: an object that one holds and that
    refers to the parameter would never be freed.
    """

    def __init__(self, claim: Any) -> None:
        self._claim = ref(claim)

    @untraced
    def __call__(self, _: Tensor) -> None:
        """Called when autograd has accumulated all it has for the parameter in this backward."""
        claim = self._claim()
        if claim is not None:  # the other hook keeps it as long as the parameter lives
            claim._ready()


class GradientClaim(Claim):
    """A claim that is notified of every gradient of its parameter.

    FSDP2 gives a sharded parameter its gradient itself, and calls its post-accumulate hooks alone.

    Args:
        parameter: as for `Claim`.
        owner: as for `Claim`.
        noted: called when a backward has a gradient for the parameter.
    """

    def __init__(self, parameter: nn.Parameter, owner: Any, noted: Callable[[], None]) -> None:
        super().__init__(parameter, owner)
        self._noted = noted
        if type(parameter).__name__ == "DTensor":
            hook = parameter.register_post_accumulate_grad_hook(self._before)
            self._handles.append(hook)

    def _before(self, gradient: Tensor | None) -> None:
        self._noted()


class HookedClaim(Claim):
    """A claim that is notified of every gradient of its parameter, before hooks of others run.

    Args:
        parameter: as for `Claim`.
        owner: as for `Claim`.
        ready: called when a backward has accumulated all that it has for the parameter.

    Attributes:
        hooks: the hooks that others registered on the parameter.
    """

    ready_hook: type[ReadyHook] = ReadyHook

    def __init__(self, parameter: nn.Parameter, owner: Any, ready: Callable[[], None]) -> None:
        super().__init__(parameter, owner)
        self._ready = ready
        self._handles.append(parameter.register_post_accumulate_grad_hook(self.ready_hook(self)))
        self.hooks = HeldHooks(parameter)  # defers hooks registered before ours, too

    def remove(self) -> None:
        """Removes the hooks; autograd calls those of others again."""
        super().remove()
        self.hooks.release()


class HeldHooks:
    """Post-accumulate hooks of others on one parameter, deferred until the session runs them.

    Such a hook makes an optimizer step in backward, moves the gradient elsewhere (`main_grad`), or
    changes it. So it has to see the gradient that `backward()` leaves in `param.grad`. Handles
    that were returned for the hooks stay valid.

    Args:
        parameter: the parameter.

    Attributes:
        of_node: hooks of the node that accumulates the gradient, as older libraries and
            `torch.distributed.optim._apply_optimizer_in_backward` register them.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self.of_node: _Hooks = {}
        self.follow_node()
        self.hold()

    def follow_node(self) -> None:
        """Looks up the hooks of the parameter's accumulator node, which may be a new one."""
        p = self._parameter
        self.of_node = _hooks_of_node(p) if p.requires_grad else {}

    def hold(self) -> None:
        """Defers hooks that were added since; called before a backward would call them."""
        hooks = self._parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if hooks and len(hooks) > 1:
            for key in [key for key, hook in hooks.items() if _is_foreign(hook)]:
                hooks[key] = _Held(hooks[key])
        for key, hook in list(self.of_node.items()):
            if not isinstance(hook, _Held):
                self.of_node[key] = _HeldOfNode(hook)

    @property
    def any(self) -> bool:
        """True if the parameter has hooks of others."""
        self.hold()
        return bool(self._places())

    def run(self) -> bool:
        """Calls the deferred hooks, in autograd's order.

        Returns:
            True if they changed the parameter in place, or set or removed its `grad`.
        """
        p = self._parameter
        before = p._version, p.grad is None
        for hook in [hooks[key] for hooks, key in self._places() if key in hooks]:
            hook.run(p)
        return (p._version, p.grad is None) != before

    def release(self) -> None:
        """Puts the original hooks back, so that autograd calls them."""
        for hooks, key in self._places():
            hooks[key] = hooks[key].hook

    def _places(self) -> list[tuple[Any, int]]:
        own = self._parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
        found: list[tuple[Any, int]] = [(own, key) for key in own]
        found.extend((self.of_node, key) for key in self.of_node)
        return [(hooks, key) for hooks, key in found if isinstance(hooks[key], _Held)]


def with_any(hooks: Mapping[str, HeldHooks]) -> list[str]:
    """Returns the names of the parameters that have hooks of others, in the mapping's order."""
    found = []
    for name, held in hooks.items():  # inline tests spare most calls: hooks of others are rare
        p = held._parameter
        own = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if (len(own or ()) > 1 or held.of_node) and held.any:
            found.append(name)
    return found


def _is_foreign(hook: Callable[..., Any]) -> bool:
    return not isinstance(hook, _Held | ReadyHook)


def _hooks_of_node(p: nn.Parameter) -> _Hooks:
    # Only a handle refers to the dict of a node's hooks, so one is registered and removed at once.
    node = get_gradient_edge(p).node  # unless somebody holds it, the node and its dict are freed
    handle = node.register_hook(lambda *_: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    assert hooks is not None
    return hooks
