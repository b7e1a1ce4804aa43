"""Which session owns a parameter, and the hooks of others, held until its gradient is the mean."""

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

    It does not hold the parameter, as the collector does not look through hooks of this kind.

    Attributes:
        hook: the hook.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *_: Any) -> None:
        """Nothing yet."""

    def run(self, parameter: nn.Parameter) -> None:
        """What autograd would have done."""
        self.hook(parameter)


class _HeldOfNode(_Held):
    """The same of a hook of the node that accumulates the gradient: it is called as a node's."""

    def run(self, parameter: nn.Parameter) -> None:
        """What autograd would have done."""
        self.hook((), (parameter.grad,))


class ReadyHook:
    """A post-accumulate hook of a claim, which it does not keep alive.

    The collector does not look through post-accumulate hooks: what one holds stays for ever, if
    that holds the parameter.
    """

    def __init__(self, claim: Any) -> None:
        self._claim = ref(claim)

    @untraced
    def __call__(self, _: Tensor) -> None:
        """Autograd has nothing more for the parameter in this backward."""
        claim = self._claim()
        if claim is not None:  # the other hook keeps it as long as the parameter lives
            claim._ready()


class HookedClaim(Claim):
    """A claim that hears of every gradient of its parameter, before anybody else's hooks do.

    Args:
        parameter: as for `Claim`.
        owner: as for `Claim`.
        ready: called when a backward has accumulated all that it has for the parameter.

    Attributes:
        hooks: those that others registered on the parameter.
    """

    ready_hook: type[ReadyHook] = ReadyHook

    def __init__(self, parameter: nn.Parameter, owner: Any, ready: Callable[[], None]) -> None:
        super().__init__(parameter, owner)
        self._ready = ready
        self._handles.append(parameter.register_post_accumulate_grad_hook(self.ready_hook(self)))
        self.hooks = HeldHooks(parameter)  # which holds those from before, called before ours

    def remove(self) -> None:
        """Takes the hooks away; those of others are called by autograd again."""
        super().remove()
        self.hooks.release()


class HeldHooks:
    """The hooks behind the accumulation of one parameter's gradient that are not the session's.

    They are an optimizer's step in backward, take the gradient to somewhere else (`main_grad`), or
    change it, so they have to see what `backward()` leaves in `param.grad`. Handles that were
    returned for them stay valid.

    Args:
        parameter: whose.

    Attributes:
        of_node: hooks of the node that accumulates the gradient, by which older libraries, and
            `torch.distributed.optim._apply_optimizer_in_backward`, hear of it.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self.of_node: _Hooks = {}
        self.follow_node()
        self.hold()

    def follow_node(self) -> None:
        """The parameter may have another node than before, which has hooks of its own."""
        p = self._parameter
        self.of_node = _hooks_of_node(p) if p.requires_grad else {}

    def hold(self) -> None:
        """Holds those that came since; before a backward comes to calling them."""
        hooks = self._parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if hooks and len(hooks) > 1:
            for key in [key for key, hook in hooks.items() if _is_foreign(hook)]:
                hooks[key] = _Held(hooks[key])
        for key, hook in list(self.of_node.items()):
            if not isinstance(hook, _Held):
                self.of_node[key] = _HeldOfNode(hook)

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
        for hook in [hooks[key] for hooks, key in self._places() if key in hooks]:
            hook.run(p)
        return (p._version, p.grad is None) != before

    def release(self) -> None:
        """Gives autograd its hooks back."""
        for hooks, key in self._places():
            hooks[key] = hooks[key].hook

    def _places(self) -> list[tuple[Any, int]]:
        own = self._parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
        found: list[tuple[Any, int]] = [(own, key) for key in own]
        found.extend((self.of_node, key) for key in self.of_node)
        return [(hooks, key) for hooks, key in found if isinstance(hooks[key], _Held)]


def with_any(hooks: Mapping[str, HeldHooks]) -> list[str]:
    """The names of those parameters that have hooks of others, in their order."""
    found = []
    for name, held in hooks.items():  # without a call for each: mostly there are none
        p = held._parameter
        own = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if (len(own or ()) > 1 or held.of_node) and held.any:
            found.append(name)
    return found


def _is_foreign(hook: Callable[..., Any]) -> bool:
    return not isinstance(hook, _Held | ReadyHook)


def _hooks_of_node(p: nn.Parameter) -> _Hooks:
    """The dict in which the hooks of the node that accumulates a gradient are, and will be.

    Only a handle knows it, so a hook is registered, and removed at once.
    """
    node = get_gradient_edge(p).node  # which may go when nobody holds it, and its dict with it
    handle = node.register_hook(lambda *_: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    assert hooks is not None
    return hooks
