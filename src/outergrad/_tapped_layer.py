"""A layer with a rule while a session is attached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outergrad._class_swap import ClassSwap
from outergrad._live_uses import LiveUses
from outergrad._own_parameters import OwnParameters
from outergrad._protocols import Rule
from outergrad._tap import NO_TASK, Tap, WatchedParameter, current_task, is_shared
from outergrad._types import Call, Factors, Slot


class LayerSink(Protocol):
    """Who is told what happens in layers, in the order in which it happens."""

    def taps(self, layer: TappedLayer) -> bool:
        """Whether the layer's products should be tapped in this forward."""
        ...

    def on_factors(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """A product's delta has arrived; its rows can be computed at any later time."""
        ...


class TappedLayer:
    """A module whose class was swapped for one that computes through taps."""

    def __init__(
        self,
        module: nn.Module,
        rule: Rule,
        slots: Sequence[Slot],
        watched: Sequence[Sequence[WatchedParameter]],
        sink: LayerSink,
    ) -> None:
        self.module, self.rule, self.slots = module, rule, tuple(slots)
        self._watched = [tuple(params) for params in watched]
        self._sink = sink
        self._live = [LiveUses() for _ in slots]
        self._untapped = [0] * len(self.slots)
        self._awaited: list[int | None] = [None] * len(self.slots)
        self._decided = False
        self._own = OwnParameters([module], [p for params in watched for p in params])
        self._swap = ClassSwap(module, self._forward)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.active():
            return self.rule.forward(self.module, self.tap, *args, **kwargs)
        if torch.is_grad_enabled():
            self.note_untapped(args, kwargs)
        return self._swap.plain_forward(*args, **kwargs)

    def restore(self) -> None:
        """Gives the module its own class back."""
        self._swap.restore()

    def active(self) -> bool:
        """Whether this forward goes through taps; a recomputation does what the forward did."""
        if not torch.is_grad_enabled():
            return False
        if current_task() == NO_TASK:
            watched = [p for params in self._watched for p in params]
            self._decided = self._sink.taps(self) and all(p.tappable() for p in watched)
        return self._decided and self._own.are_there()

    def tap(self, y: Tensor, a: Tensor, slot: int = 0, rows: int | None = None) -> Tensor:
        """Implements `TapFn` for this layer."""
        slot %= len(self.slots)
        here = self.slots[slot]
        if rows is None:
            rows = y.numel() // max(here.groups * here.outputs, 1)
        params = [p.parameter for p in self._watched[slot]]
        tapped: Tensor = Tap.apply(y, a, self, slot, *params)  # type: ignore[assignment]
        if current_task() == NO_TASK:  # in a recomputation only the saved tensors count
            self._live[slot].add(tapped.grad_fn, rows, tapped.dtype)
        return tapped

    def note_untapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts rows of a forward without taps: the next plan may want them as factors."""
        if not any(p.parameter.requires_grad for params in self._watched for p in params):
            return
        for slot, rows in enumerate(self.rule.rows(self.module, args, kwargs)):
            self._untapped[slot] += rows

    def forget_untapped(self) -> None:
        """Starts counting anew."""
        self._untapped = [0] * len(self.slots)

    def announced(self, slot: int) -> tuple[int, int, torch.dtype]:
        """Rows that the current backward will capture, that passed untapped, and their dtype.

        From now on their deltas are awaited, and no others.
        """
        uses = self._live[slot].reached()
        if not any(watched.accumulates() for watched in self._watched[slot]):
            uses = []
        self._awaited[slot] = len(uses)
        dtype = reduce(torch.promote_types, (u.dtype for u in uses)) if uses else torch.float32
        return sum(use.rows for use in uses), self._untapped[slot], dtype

    def forget_awaited(self) -> None:
        """The step is over: no deltas are awaited until another one is announced."""
        self._awaited = [None] * len(self.slots)

    def _count(self, slot: int, node: Any) -> None:
        """Checks that a delta was announced: the others would not hear of its rows.

        Raises:
            RuntimeError: it was not.
        """
        awaited = self._awaited[slot]
        if awaited == 0:
            raise RuntimeError(
                f"{self.slots[slot].layer!r}: this backward brings more deltas than it had "
                f"announced to the other sites, so the step is void: call optimizer.zero_grad() "
                f"and go on; if it comes again, please report it ({self._live[slot].told(node)})"
            )
        if awaited is not None:
            self._awaited[slot] = awaited - 1

    def capture(self, ctx: Any, slot: int, delta: Tensor) -> None:
        """Takes the delta of one use of a slot.

        Raises:
            RuntimeError: for double backward, reentrant checkpointing and autograd.grad on weights.
        """
        if not is_shared(ctx, self._watched[slot]):
            return
        call = Call(ctx.saved_tensors[0], delta)
        self._sink.on_factors(self.slots[slot], lambda: self.rule.factors(self.module, slot, call))
        self._count(slot, ctx)
