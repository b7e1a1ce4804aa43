"""Detection of changes to a model's parameters since the sites agreed on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from outergrad.capture.optimizer_steps import held
from outergrad.capture.parameters import accumulators
from outergrad.capture.untappable import in_functional_call
from outergrad.capture.wrappers import calling_wrapper, exchanged_by, wrapper_inside
from outergrad.core.sites import Site

_KIND = attrgetter("dtype", "device", "shape")
_ADDRESS = attrgetter("_cdata")
"""Address of a parameter's C++ object, not of its values. While its accumulator node is kept, no
other parameter has it. `swap_tensors` changes it, which autograd does not report."""
_REQUIRES_GRAD = attrgetter("requires_grad")


class Look(Enum):
    """Conversions of parameters that a check of the model looks for."""

    NONE = 0
    KINDS = 1
    """Parameters that have another dtype, device or shape now, or were swapped."""
    NODES = 2
    """Also parameters that were converted and converted back: they have another accumulator node.
    This check takes longer."""


_AGAIN = (
    "call session.detach(), change the model, and call og.distribute(model, ...) again on every "
    "site"
)


@dataclass(frozen=True)
class Change:
    """A change of a parameter or its gradient since `distribute`, in words for an error message.

    Attributes:
        name: full name of the parameter.
        what: what has changed.
        follows: the consequence, printed after the site.
        remedy: what the user can do.
    """

    name: str
    what: str
    follows: str = "and would not be shared"
    remedy: str = _AGAIN

    def error(self, site: Site) -> RuntimeError:
        """Returns the error to raise on a site."""
        return RuntimeError(
            f"{self.name!r} {self.what} on {site.called} {self.follows}: {self.remedy}"
        )


def wrapped(name: str, wrapper: nn.Module) -> Change:
    """Returns the change of a parameter that another library's wrapper also synchronises."""
    kind = type(wrapper).__name__
    return Change(
        name,
        f"is in a {kind}",
        "as well as in a distributed model, and both exchange its gradient",
        f"leave out {kind} (accelerator.prepare(model) and fabric.setup(model) add one, too: "
        f"docs/integrations.md), or og.distribute, and pass the plain model to the other",
    )


def overwritten(name: str) -> Change:
    """Returns the change of a gradient rewritten after the session, before `backward` returned."""
    return Change(
        name,
        "has another gradient at the end of backward",
        "than the mean over the sites that og.distribute left there",
        "something else exchanges or rewrites gradients at the end of backward, as "
        "DistributedDataParallel does: leave it out, or do it when backward() has returned, or in "
        "a hook of p.register_post_accumulate_grad_hook",
    )


class ModelWatch:
    """Compares a model with its state when the sites agreed on it.

    The comparison is one walk over the dicts in which modules keep parameters and child modules,
    without a line of Python per module. Parameters are compared by name only if that walk finds a
    difference: frozen and `og.Local()` parameters may be added, removed and replaced.

    Args:
        model: the model, held weakly; it owns the watch.
        trained: the shared parameters that require a gradient, by full name.
        local: the parameters that each site keeps to itself, by full name.
        is_local: true for the name of a parameter that would be each site's own.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        local: Mapping[str, nn.Parameter],
        is_local: Callable[[str], bool],
    ) -> None:
        self._model, self._trained, self._is_local = ref(model), dict(trained), is_local
        self._known = {id(p): p for p in (*trained.values(), *local.values())}
        self._shared = frozenset(map(id, trained.values()))
        self._kinds = list(map(_KIND, trained.values()))
        self._nodes: Sequence[Node | None] | None = None
        self._follows = False
        self._addresses: list[int] = []
        self._note(model)

    def follow(self, nodes: Sequence[Node | None]) -> None:
        """Compares the trained parameters' accumulator nodes, too: a conversion makes new ones.

        Args:
            nodes: the nodes that accumulate their gradients, in the order of `trained`.
        """
        self._nodes, self._follows = nodes, True
        self._addresses = list(map(_ADDRESS, self._trained.values()))

    def hold_again(self, nodes: Sequence[Node | None]) -> None:
        """Holds the current accumulator nodes again, if `follow` was called."""
        if self._follows:
            self._nodes = nodes

    def let_go(self) -> None:
        """Drops the nodes until `hold_again`; kinds and addresses are still compared."""
        self._nodes = None

    def unfollow(self) -> None:
        """Compares only what is registered in the modules, from now on."""
        self._nodes, self._follows = None, False

    def change(self, look: Look = Look.NODES) -> Change | None:
        """Returns the first change that the sites have not agreed on, or None.

        Args:
            look: which conversions to look for.
        """
        model = self._model()
        if model is None or torch._C._are_functorch_transforms_active():
            return None
        name = self._converted(look) if self._follows and look != Look.NONE else None
        if name is not None:
            return Change(name, "was replaced or converted after og.distribute()")
        return None if self._is_as_noted() or in_functional_call() else self._difference(model)

    def wrapped(self) -> Change | None:
        """Returns a change if a wrapper that exchanges gradients itself is calling the model."""
        wrapper = calling_wrapper(self._shared)
        return None if wrapper is None else self._is_in(wrapper)

    def _is_in(self, wrapper: nn.Module) -> Change | None:
        there = exchanged_by(wrapper)
        name = next((name for name, p in self._trained.items() if id(p) in there), None)
        return None if name is None else wrapped(name, wrapper)

    def _converted(self, look: Look) -> str | None:
        """Returns the name of the first converted parameter, with NODES also if converted back."""
        params = list(self._trained.values())
        kinds, addresses, held = list(map(_KIND, params)), list(map(_ADDRESS, params)), self._nodes
        same = kinds == self._kinds and self._addresses == addresses
        if same and (look == Look.KINDS or held is None):
            return None
        found = addresses if held is None else accumulators(params)
        if found == held and kinds == self._kinds:
            return None
        kept = map(_is_kept, found, self._addresses if held is None else held)
        pairs = zip(self._trained, kept, kinds, self._kinds, strict=True)
        return next((name for name, same, now, then in pairs if not same or now != then), None)

    @contextmanager
    def as_agreed(self) -> Iterator[None]:
        """Context in which converted parameters are zeros of the agreed dtype, device and shape."""
        pairs = list(zip(self._trained.values(), self._kinds, strict=True))
        converted = [(p, p.data, kind) for p, kind in pairs if (p.dtype, p.device, p.shape) != kind]
        try:
            for p, _, (dtype, device, shape) in converted:
                p.data = torch.zeros(1, dtype=dtype, device=device).expand(shape)
            yield
        finally:
            for p, own, _ in converted:
                p.data = own

    def holds_some_of(self, optimizer: Optimizer) -> bool:
        """True if an optimizer holds parameters that the model has now or had when last noted."""
        model = self._model()
        found = () if model is None else model.parameters()
        return self.held_some_of(optimizer) or not held(optimizer).isdisjoint(map(id, found))

    def held_some_of(self, optimizer: Optimizer) -> bool:
        """True if an optimizer holds parameters that the model had when last noted."""
        return not self._had.isdisjoint(held(optimizer))

    def _is_as_noted(self) -> bool:
        return self._ids == self._walk() and not any(map(_REQUIRES_GRAD, self._frozen))

    def _walk(self) -> list[int]:
        """Returns the ids of all parameters and child modules registered in the modules."""
        return list(map(id, chain.from_iterable(map(dict.values, self._dicts))))

    def _note(self, model: nn.Module) -> None:
        modules, places = list(model.modules()), dict(_places(model))
        self._dicts: list[dict[str, Any]] = [
            d
            for module in modules
            for d in (module._parameters, module._modules)
            if isinstance(d, dict)  # TorchScript has no such dicts, and allows no replacement
        ]
        self._frozen = [p for name, p in places.items() if self._is_frozen(name, p)]
        self._held = modules, places  # kept alive, so that Python reuses no id
        self._had = {id(p) for p in (*self._trained.values(), *places.values())}
        self._ids = self._walk()

    def _is_frozen(self, name: str, p: nn.Parameter) -> bool:
        return not (p.requires_grad or id(p) in self._known or self._is_local(name))

    def _difference(self, model: nn.Module) -> Change | None:
        found = dict(_places(model))
        if not all(isinstance(p, nn.Parameter) for p in found.values()):
            return None  # plain tensors stand in for parameters for a while
        found = {name: self._as_agreed(name, p) for name, p in found.items()}
        change = next(self._changes(found), None)
        if change is None:
            wrapper = wrapper_inside(model, self._shared)
            change = None if wrapper is None else self._is_in(wrapper)
        if change is None:
            self._note(model)
        return change

    def _as_agreed(self, name: str, p: nn.Parameter) -> nn.Parameter:
        """Returns the agreed parameter that the one found under this name stands for."""
        return p

    def _changes(self, found: Mapping[str, nn.Parameter]) -> Iterator[Change]:
        here, frozen = set(map(id, found.values())), set(map(id, self._frozen))
        for name, p in self._trained.items():
            if p.requires_grad and id(p) not in here:
                gone = "taken out of the model" if name not in found else "replaced or converted"
                yield Change(name, f"was {gone} after og.distribute()")
        for name, p in found.items():
            if p.requires_grad and id(p) not in self._known and not self._is_local(name):
                was_frozen = id(p) in frozen
                yield Change(name, _FROZEN if was_frozen else "was added after og.distribute()")


_FROZEN = "was frozen when the model was distributed, requires a gradient now"


def _is_kept(found: Node | int | None, then: Node | int | None) -> bool:
    return found is None or then is None or found == then


class ShardWatch(ModelWatch):
    """Watch of an FSDP2 model, whose modules hold unsharded parameters while they compute."""

    def _as_agreed(self, name: str, p: nn.Parameter) -> nn.Parameter:
        whole = type(p).__name__ != "DTensor"
        return self._trained.get(name, p) if whole else p


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields every parameter under each of its names: tied ones have several."""
    return model.named_parameters(remove_duplicate=False)
