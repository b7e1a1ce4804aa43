"""Whether a model still has the parameters that the sites agreed on."""

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

_KIND = attrgetter("dtype", "device", "shape")
_ADDRESS = attrgetter("_cdata")
"""Of a parameter itself, not of its values; as long as its node of autograd is kept, it is no
other's. `swap_tensors` gives it another one, and autograd then tells nothing of it."""
_REQUIRES_GRAD = attrgetter("requires_grad")


class Look(Enum):
    """For which conversions of parameters a model is looked through."""

    NONE = 0
    KINDS = 1
    """What is of another dtype, device or shape now, or was swapped."""
    NODES = 2
    """Also what was so in between: it has another node of autograd. To find these takes longer."""


_AGAIN = (
    "call session.detach(), change the model, and call og.distribute(model, ...) again on every "
    "site"
)


@dataclass(frozen=True)
class Change:
    """What has become of a parameter, or of its gradient, since `distribute`.

    Attributes:
        name: of the parameter.
        what: that it is not shared as it is now, in words.
        follows: from that, with the site before it.
        remedy: what the user can do.
    """

    name: str
    what: str
    follows: str = "and would not be shared"
    remedy: str = _AGAIN

    def error(self, site: int) -> RuntimeError:
        """What the user of the site is told."""
        return RuntimeError(
            f"{self.name!r} {self.what} on site {site} {self.follows}: {self.remedy}"
        )


def wrapped(name: str, wrapper: nn.Module) -> Change:
    """That a parameter is also shared by a wrapper of another library."""
    kind = type(wrapper).__name__
    return Change(
        name,
        f"is in a {kind}",
        "as well as in a distributed model, and both exchange its gradient",
        f"leave out {kind} (accelerator.prepare(model) and fabric.setup(model) add one, too: "
        f"docs/integrations.md), or og.distribute, and pass the plain model to the other",
    )


def overwritten(name: str) -> Change:
    """That a gradient was changed behind a session, and before `backward` returned."""
    return Change(
        name,
        "has another gradient at the end of backward",
        "than the mean over the sites that og.distribute left there",
        "something else exchanges or rewrites gradients at the end of backward, as "
        "DistributedDataParallel does: leave it out, or do it when backward() has returned, or in "
        "a hook of p.register_post_accumulate_grad_hook",
    )


class ModelWatch:
    """Compares a model with what it was when the sites agreed on it.

    The comparison is one walk over the dicts in which modules keep parameters and modules, without
    a line of Python per module. Only if something differs the model is looked at by name: frozen
    and `og.Local()` parameters may come, go and be replaced.

    Args:
        model: the model; it owns the watch, which does not keep it alive.
        trained: the shared parameters that require a gradient, by full name.
        local: those that each site keeps to itself.
        is_local: whether a parameter of some name would be each site's own, too.
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
        """Compares the trained parameters' nodes of autograd, too: a conversion makes new ones.

        Args:
            nodes: which accumulate their gradients, in the order of the model.
        """
        self._nodes, self._follows = nodes, True
        self._addresses = list(map(_ADDRESS, self._trained.values()))

    def hold_again(self, nodes: Sequence[Node | None]) -> None:
        """Goes on to compare nodes, which are of now."""
        if self._follows:
            self._nodes = nodes

    def let_go(self) -> None:
        """Holds no nodes, until it is given them again; kinds and addresses are compared."""
        self._nodes = None

    def unfollow(self) -> None:
        """Compares nothing but what is registered in the modules."""
        self._nodes, self._follows = None, False

    def change(self, look: Look = Look.NODES) -> Change | None:
        """The first difference that matters.

        Args:
            look: for which conversions.
        """
        model = self._model()
        if model is None or torch._C._are_functorch_transforms_active():
            return None
        name = self._converted(look) if self._follows and look != Look.NONE else None
        if name is not None:
            return Change(name, "was replaced or converted after og.distribute()")
        return None if self._is_as_noted() or in_functional_call() else self._difference(model)

    def wrapped(self) -> Change | None:
        """Whether a wrapper that exchanges gradients itself is calling the model; on the stack."""
        wrapper = calling_wrapper(self._shared)
        return None if wrapper is None else self._is_in(wrapper)

    def _is_in(self, wrapper: nn.Module) -> Change | None:
        there = exchanged_by(wrapper)
        name = next((name for name, p in self._trained.items() if id(p) in there), None)
        return None if name is None else wrapped(name, wrapper)

    def _converted(self, look: Look) -> str | None:
        """The first parameter that has another dtype, device or shape, or had in between."""
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
        """Meanwhile the trained parameters are of the kinds that messages are made for."""
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
        """Whether an optimizer is about parameters that the model has or had."""
        model = self._model()
        found = () if model is None else model.parameters()
        return self.held_some_of(optimizer) or not held(optimizer).isdisjoint(map(id, found))

    def held_some_of(self, optimizer: Optimizer) -> bool:
        """Whether it is about parameters that the model had when it was looked through last."""
        return not self._had.isdisjoint(held(optimizer))

    def _is_as_noted(self) -> bool:
        return self._ids == self._walk() and not any(map(_REQUIRES_GRAD, self._frozen))

    def _walk(self) -> list[int]:
        """Identities of all that is registered in the modules."""
        return list(map(id, chain.from_iterable(map(dict.values, self._dicts))))

    def _note(self, model: nn.Module) -> None:
        modules, places = list(model.modules()), dict(_places(model))
        self._dicts: list[dict[str, Any]] = [
            d
            for module in modules
            for d in (module._parameters, module._modules)
            if isinstance(d, dict)  # TorchScript keeps them elsewhere, and lets none be replaced
        ]
        self._frozen = [p for name, p in places.items() if self._is_frozen(name, p)]
        self._held = modules, places  # so that no identity is given to another object
        self._had = {id(p) for p in (*self._trained.values(), *places.values())}
        self._ids = self._walk()

    def _is_frozen(self, name: str, p: nn.Parameter) -> bool:
        return not (p.requires_grad or id(p) in self._known or self._is_local(name))

    def _difference(self, model: nn.Module) -> Change | None:
        found = dict(_places(model))
        if not all(isinstance(p, nn.Parameter) for p in found.values()):
            return None  # somebody computes with other tensors for a while
        found = {name: self._as_agreed(name, p) for name, p in found.items()}
        change = next(self._changes(found), None)
        if change is None:
            wrapper = wrapper_inside(model, self._shared)
            change = None if wrapper is None else self._is_in(wrapper)
        if change is None:
            self._note(model)
        return change

    def _as_agreed(self, name: str, p: nn.Parameter) -> nn.Parameter:
        """What counts as the parameter at a place."""
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
    """Of a model of FSDP2, whose modules hold the whole parameters while they compute."""

    def _as_agreed(self, name: str, p: nn.Parameter) -> nn.Parameter:
        whole = type(p).__name__ != "DTensor"
        return self._trained.get(name, p) if whole else p


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every name of every parameter: tied ones have several."""
    return model.named_parameters(remove_duplicate=False)
