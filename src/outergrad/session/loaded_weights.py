"""A warning where weights are loaded without what a method had not sent of their gradients."""

from __future__ import annotations

import warnings
from contextlib import suppress

from torch import nn

from outergrad.capture.class_swap import StateSwap
from outergrad.core.types import Factors, Gradient
from outergrad.messages.raw import digest
from outergrad.session.exchange import Exchange
from outergrad.session.membership import Membership

_REMEDY = (
    "what is owed is no part of the model's state: save the session beside it "
    "(session.state_dict(), or og.Checkpoints, which saves both), and load both "
    "(docs/checkpoints.md)"
)


class LoadedWeights:
    """Notices weights that are loaded into a model whose method remembers what it has not sent.

    A state of the model has a note of the step if something was owed when it was made. Whether a
    state of the session is loaded, too, is known when training goes on, so it warns before the next
    forward. Other weights for a while, as averaged ones for an evaluation, are no reason to.

    Args:
        exchange: of the session.
        at: membership of the session.
        method: the user's, as text.
    """

    def __init__(self, exchange: Exchange, at: Membership, method: str) -> None:
        self._exchange, self._at, self._method = exchange, at, method
        self._swap: StateSwap | None = None
        self._told: str | None = None
        self._warned = False
        self._before = 0
        self._resumed_at: int | None = None

    def watch(self, model: nn.Module) -> None:
        """Begins to look at a model, if a method has a memory."""
        compressors = self._exchange.compressors
        if any(c.remembers(unit) for c, units in compressors.items() for unit in units):
            with suppress(TypeError):  # a class that allows no subclass
                self._swap = StateSwap(model, self._note, self._on_load)

    def remove(self) -> None:
        """Ends the looking."""
        if self._swap is not None:
            self._swap.restore()

    def resumed(self) -> None:
        """Notes that a state of the session was loaded: weights of this step go with it."""
        self._told, self._resumed_at = None, self._at.stats.step

    def check(self) -> None:
        """Warns once of loaded weights that are not those of before; called before a forward."""
        told, self._told = self._told, None
        if told is not None and not self._warned and self._digest() != self._before:
            self._warned = True
            warnings.warn(told, stacklevel=2)

    def _note(self) -> int | None:
        return self._at.stats.step if self._owes() else None

    def _on_load(self, saved_at: int | None) -> None:
        step, owes = self._at.stats.step, self._owes()
        if step == self._resumed_at or (saved_at is None and not owes):
            return
        if self._told is None:
            self._before = self._digest()
        self._told = self._words(saved_at, step if owes else None)

    def _owes(self) -> bool:
        """True if something is unsent; a residual of zeros is nothing."""
        compressors = self._exchange.compressors
        units = (unit for _, units in compressors.items() for unit in units)
        memories = (pair for unit in units for pair in compressors.memories(unit))
        return any(_is_something(store.residual(slot)) for store, slot in memories)

    def _words(self, saved_at: int | None, owed_at: int | None) -> str:
        here = f"{self._at.me.called}: weights were loaded"
        lost = f"what {self._method} had not sent yet of the gradients before"
        if saved_at is not None:
            here += f" that were saved after step {saved_at}, and {lost} is lost with them"
        if owed_at is not None:
            here += (
                f"; what is owed after step {owed_at} is of other weights, and is sent all the same"
            )
        return f"{here}: {_REMEDY}"

    def _digest(self) -> int:
        params = self._exchange.model.params.values()
        return digest(b"", [p.detach() for p in params])


def _is_something(residual: Gradient | None) -> bool:
    if isinstance(residual, Factors):
        return bool(residual.d_GRO.any() & residual.a_GRI.any())
    return residual is not None and bool(residual.any())
