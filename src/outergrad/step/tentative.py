"""Residuals of gradients that the loop may still throw away."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from outergrad.capture.optimizer_steps import held, held_by_any
from outergrad.core.model import Compressors, slots_of
from outergrad.core.sites import Site
from outergrad.core.types import Place


@dataclass(frozen=True)
class _Left:
    """A gradient that a step left, and the state of its parameter then.

    Attributes:
        grad: weak reference to the gradient.
        changes: version of the gradient.
        weights: version and data pointer of the parameter.
    """

    grad: ref[Tensor]
    changes: int
    weights: tuple[int, int]

    def is_there(self, p: Tensor) -> bool:
        """True if the parameter still has it; a gradient that was set to zero is gone."""
        grad = p.grad
        if grad is None or not self.is_object_of(p):
            return False
        return grad._version == self.changes or bool(grad.any())

    def is_object_of(self, p: Tensor) -> bool:
        """True if `param.grad` is the same tensor, changed in place or not."""
        return p.grad is self.grad()


def _weights(p: Tensor) -> tuple[int, int]:
    return p._version, p.data_ptr()


class Tentative:
    """Takes back what a compressor remembers of gradients that no step of an optimizer used.

    Error feedback sends later what was not sent of a gradient, because the sent part was applied.
    If the loop drops the gradient instead (an attack on inputs, another model's loss that goes
    through this one), the residual of before holds again. A gradient counts as thrown away if, when
    the next backward begins, `param.grad` has it no more, the weights are as they were, and an
    optimizer holds the parameter but has made no step. If no optimizer of torch.optim holds it,
    nobody can know, and it counts as used.

    Each site goes by its own loop, and takes back nothing but what it has not sent itself. So sites
    need not agree: plans and messages do not depend on it.

    Args:
        params: parameters of the model, by name.
        compressors: compressors of its units.
        site: returns this site, for messages.
    """

    def __init__(
        self, params: Mapping[str, Tensor], compressors: Compressors, site: Callable[[], Site]
    ) -> None:
        self._params, self._compressors, self._site = params, compressors, site
        self._left: dict[str, _Left] = {}
        self._optimized: set[str] = set()
        """Parameters that an optimizer holds, known once it has stepped or was searched for."""
        self._taken_back: set[str] = set()
        """Parameters with residuals taken back since they were last optimized."""
        self._looked = self._warned = False

    @cached_property
    def _places(self) -> dict[str, list[Place]]:
        """Places of the parameters for which something may be remembered."""
        found: dict[str, list[Place]] = {}
        for compressor, units in self._compressors.items():
            for unit in units:
                for slot in slots_of(unit) if compressor.remembers(unit) else ():
                    if slot.weight in self._params and slot.place not in found.get(slot.weight, ()):
                        found.setdefault(slot.weight, []).append(slot.place)
        return found

    # -- called by a session --------------------------------------------------------------------

    def left(self, used: Collection[str]) -> None:
        """Records the gradients that a backward left in these parameters, in a step that counts."""
        if not self._places:
            return
        here = []
        for name in self._places:
            p = self._params[name]
            if name in used and (grad := p.grad) is not None:
                self._left[name] = _Left(ref(grad), grad._version, _weights(p))
                here.append(name)
        self._hold(here)

    def nothing_left(self) -> None:
        """Records a step that counts without a backward here; all residuals count as used."""
        self._hold(())

    def used(self, names: Iterable[str]) -> None:
        """Records that the gradients of these parameters were used."""
        self._settle([name for name in names if name in self._left], used=True)

    def applied_by(self, optimizer: Optimizer) -> None:
        """Records that an optimizer is about to apply the gradients of its parameters."""
        if not self._left and not self._taken_back:
            return
        own = held(optimizer)
        names = [n for n in self._places if id(p := self._params[n]) in own and p.grad is not None]
        self._optimized.update(names)
        if not self._taken_back.isdisjoint(names):
            self._warn_of_own_gradients(names)
            self._taken_back.difference_update(names)
        self.used(names)

    def begin(self) -> None:
        """Begins a backward: takes back what was thrown away since the last one."""
        gone, same = [], []
        for name, left in list(self._left.items()):
            p = self._params[name]
            if _weights(p) != left.weights:
                self._settle([name], used=True)
            else:
                (same if left.is_there(p) else gone).append(name)
        if same and not self._any_gradient():  # zeroed past their versions (`grad.data`)
            gone += same
        if gone:
            optimized = self._are_optimized(gone)
            self._settle([name for name in gone if name in optimized], used=False)
            self._settle([name for name in gone if name not in optimized], used=True)
            self._taken_back |= optimized

    def forget(self) -> None:
        """Lets all that is remembered now count as used."""
        self.used(list(self._left))

    # -------------------------------------------------------------------------------------------

    def _any_gradient(self) -> bool:
        """True if some parameter has a gradient that is not zero; ends with the first."""
        grads = (p.grad for p in self._params.values())
        return any(bool(g.any()) for g in grads if g is not None and g.layout == torch.strided)

    def _hold(self, names: Collection[str]) -> None:
        places = [place for name in names for place in self._places[name]]
        for store in self._compressors.stores:
            store.keep_before(places)

    def _settle(self, names: Collection[str], *, used: bool) -> None:
        if not names:
            return
        for name in names:
            del self._left[name]
        places = [place for name in names for place in self._places[name]]
        for store in self._compressors.stores:
            store.decide(places, used=used)

    def _are_optimized(self, names: Collection[str]) -> set[str]:
        """Returns the parameters that an optimizer holds, even if it has not stepped yet."""
        unknown = set(names) - self._optimized
        if unknown and not self._looked:
            self._looked = True  # goes through all objects of the process
            found = held_by_any({id(self._params[name]): name for name in self._params})
            self._optimized |= found
        return set(names) & self._optimized

    def _warn_of_own_gradients(self, names: Collection[str]) -> None:
        """Warns if gradients of several passes, combined by hand, were mistaken for unused."""
        left, params = self._left, self._params
        others = [n for n in names if n in left and not left[n].is_object_of(params[n])]
        if not others or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"on {self._site().called} an optimizer applies another gradient to {others[0]!r} than "
            f"the last backward left, and gradients of backward passes before it were taken out "
            f"of param.grad: if they were combined by hand, as in gradient surgery, what error "
            f"feedback had not sent of them is lost. Let backward passes add up in param.grad, or "
            f"use an exact method or error_feedback=None / False (docs/loops.md)",
            stacklevel=2,
        )
