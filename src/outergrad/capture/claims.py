"""Which session owns a parameter, and the hooks of others, held until its gradient is the mean."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outergrad.capture.engine import untraced

_Hooks = MutableMapping[int, Callable[..., Any]]


class Claim:
    """A hook of a parameter: marks it as a session's, which lives as long as the parameter so.

    Python's garbage collector looks through a hook of `register_hook` at its owner, so that both
    go together when nobody else has either.

    Args:
        parameter: requires a gradient.
        owner: what is kept alive.
    """

    def __init__(self, parameter: nn.Parameter, owner: Any) -> None:
        self.owner = owner
        self._handles: list[RemovableHandle] = [parameter.register_hook(self._before)]

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _before(self, gradient: Tensor | None) -> None:
        """Called before a backward accumulates a gradient; nothing to do."""


def is_claimed(p: nn.Parameter) -> bool:
    """Whether the parameter belongs to a session."""
    hooks = (p._backward_hooks or {}).values()
    return any(isinstance(getattr(hook, "__self__", None), Claim) for hook in hooks)


def unclaim(p: nn.Parameter) -> None:
    """Takes a session's hooks off a parameter."""
    for hook in list((p._backward_hooks or {}).values()):
        claim = getattr(hook, "__self__", None)
        if isinstance(claim, Claim):
            claim.remove()


class _Held:
    """Stands in the place of a hook, which autograd calls too early.

    Attributes:
        hook: the hook, with what it is called with.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *_: Any) -> None:
        """Nothing yet."""


class _Ready:
    """A post-accumulate hook of a claim, which it does not keep alive.

    The collector does not look through post-accumulate hooks: what one holds stays for ever, if
    that holds the parameter.
    """

    def __init__(self, claim: HookedClaim) -> None:
        self._claim = ref(claim)

    @untraced
    def __call__(self, t: Tensor) -> None:
        claim = self._claim()
        if claim is not None:  # the other hook keeps it as long as the parameter lives
            claim._after(t)


class HookedClaim(Claim):
    """A claim that hears of every gradient of its parameter, before anybody else's hooks do.

    Args:
        parameter: as for `Claim`.
        owner: as for `Claim`.
        ready: called when a backward has accumulated all that it has for the parameter.

    Attributes:
        hooks: those that others registered on the parameter.
    """

    def __init__(self, parameter: nn.Parameter, owner: Any, ready: Callable[[], None]) -> None:
        self.hooks = HeldHooks(parameter)
        super().__init__(parameter, owner)
        self._ready = ready
        self._handles.append(parameter.register_post_accumulate_grad_hook(_Ready(self)))

    def remove(self) -> None:
        """Takes the hooks away; those of others are called by autograd again."""
        super().remove()
        self.hooks.release()

    @untraced
    def _after(self, _: Tensor) -> None:
        self._ready()


class HeldHooks:
    """The post-accumulate hooks of one parameter that are not the session's.

    They are an optimizer's step in backward, or change the gradient, so they have to see what
    `backward()` leaves in `param.grad`. Handles that were returned for them stay valid.

    Args:
        parameter: whose.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self.hold()

    def hold(self) -> None:
        """Holds those that came since; before a backward comes to calling them."""
        hooks = self._parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if hooks and len(hooks) > 1:
            for key in [key for key, hook in hooks.items() if _is_foreign(hook)]:
                hooks[key] = _Held(hooks[key])
        if "_in_backward_optimizers" in self._parameter.__dict__:
            for hooks, key in _in_backward(self._parameter):
                if not isinstance(hooks[key], _Held):
                    hooks[key] = _Held(hooks[key])

    @property
    def any(self) -> bool:
        """Whether there are any."""
        self.hold()
        return bool(self._places())

    def run(self) -> bool:
        """Calls them, in the order in which autograd would.

        Returns:
            Whether the parameter, or what was in its `grad`, is another one now.
        """
        p = self._parameter
        before = p._version, p.grad is None
        own = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        held = [(hooks[key].hook, hooks is own) for hooks, key in self._places() if key in hooks]
        for hook, takes_parameter in held:
            hook(p) if takes_parameter else hook()
        return (p._version, p.grad is None) != before

    def release(self) -> None:
        """Gives autograd its hooks back."""
        for hooks, key in self._places():
            hooks[key] = hooks[key].hook

    def _places(self) -> list[tuple[Any, int]]:
        own = self._parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
        found: list[tuple[Any, int]] = [(own, key) for key in own]
        found.extend(_in_backward(self._parameter))
        return [(hooks, key) for hooks, key in found if isinstance(hooks[key], _Held)]


def with_any(hooks: Mapping[str, HeldHooks]) -> list[str]:
    """The names of those parameters that have hooks of others, in their order."""
    found = []
    for name, held in hooks.items():  # without a call for each: mostly there are none
        p = held._parameter
        own = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if (len(own or ()) > 1 or "_in_backward_optimizers" in p.__dict__) and held.any:
            found.append(name)
    return found


def _is_foreign(hook: Callable[..., Any]) -> bool:
    return not isinstance(hook, _Held | _Ready)


def _in_backward(p: nn.Parameter) -> Iterator[tuple[_Hooks, int]]:
    """Hooks of `torch.distributed.optim._apply_optimizer_in_backward`, on a node of autograd."""
    made = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    handles = () if made is None else made.param_to_optim_hook_handle_map.get(p, ())
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            yield hooks, handle.id
