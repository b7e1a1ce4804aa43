"""Layers with a rule, whose forward goes through taps while a session is attached."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial, reduce
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outergrad.capture.batch import AnySamples, Batch, SampledUse
from outergrad.capture.class_swap import ClassSwap
from outergrad.capture.compiled import key_of
from outergrad.capture.engine import NO_TASK, current_task
from outergrad.capture.kept import Alarm, Keeper, Kept
from outergrad.capture.node_ref import LiveUses
from outergrad.capture.parameters import OwnParameters, WatchedParameter, is_shared
from outergrad.capture.tap import Tap, returned
from outergrad.capture.untappable import (
    Annotating,
    annotated_as,
    as_plain,
    copied,
    is_annotated,
    may_be_tapped,
    plain,
    same_numbers,
    why_untappable,
)
from outergrad.core.protocols import Rule
from outergrad.core.types import Factors, Slot


class LayerSink(Protocol):
    """Receives the events of layers, in their order."""

    def taps(self, layer: TappedLayer) -> bool:
        """True if the layer's products should be tapped in this forward."""
        ...

    def on_factors(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """Called when a product's delta has arrived; `factors` may be called at any later time."""
        ...


class SampleTap:
    """The tap of a layer, which also knows how many samples there are.

    Args:
        tap: of the layer.
        layer: full name of the layer.
        batch: the samples of the model's forward.
    """

    def __init__(self, tap: Callable[..., Tensor], layer: str, batch: Batch) -> None:
        self._tap, self._batch, self.layer = tap, batch, layer

    @property
    def samples(self) -> int | None:
        """B of the model's forward; None outside of it."""
        return self._batch.count

    def is_given(self, t: Tensor) -> bool:
        """True if the model was called with a tensor, or it is a view of one of these."""
        return self._batch.is_given(t)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Implements `TapFn`."""
        return self._tap(*args, **kwargs)


class TappedLayer:
    """A module whose class was swapped for one that computes through taps.

    Args:
        module: the module.
        rule: the rule of the module's type.
        slots: the layer's outer products.
        watched: the parameters of each slot.
        sink: receives the deltas.
        batch: the samples of the model's forward, if a transform tells samples apart; those of the
            layer's, if only recorders do; else None.
        alarm: the model's count of lost tensors; None for one per slot.

    Attributes:
        announced_rows: number of rows of each slot in this site's last header, tapped or not, not
            rounded; None before.
        untappable: reason why forwards that the last header covers could not be tapped, or None.
            With a reason, the announced rows are not those of the input, but more than factors
            would pay for.
    """

    untappable: str | None = None
    _why: str | None = None

    def __init__(
        self,
        module: nn.Module,
        rule: Rule,
        slots: Sequence[Slot],
        watched: Sequence[Sequence[WatchedParameter]],
        sink: LayerSink,
        batch: Batch | AnySamples | None = None,
        alarm: Alarm | None = None,
    ) -> None:
        self.module, self.rule, self.slots = module, rule, tuple(slots)
        self._batch = batch
        tells = isinstance(batch, Batch)
        self._given_tap = SampleTap(self.tap, self.slots[0].layer, batch) if tells else self.tap
        self._watched = [tuple(params) for params in watched]
        self._names = [[p.name for p in params] for params in self._watched]
        self._trained = [p for params in self._watched for p in params]
        self._sink = sink
        self._live = [LiveUses() for _ in slots]
        self._keepers = [Keeper(slot.weight, slot.numel, alarm or Alarm()) for slot in slots]
        self.announced_rows: list[int | None] = [None] * len(self.slots)
        self._untapped = [0] * len(self.slots)
        self._awaited: list[int | None] = [None] * len(self.slots)
        self._decided = False
        self._own = OwnParameters([module], self._trained)
        self._key, self._taps_in_graphs = key_of(self), sink.taps(self)
        traceable = getattr(rule, "traceable", False) and not isinstance(batch, Batch)
        self._swap = ClassSwap(module, self._forward, self._in_graph if traceable else None)
        self._annotating = Annotating(self._computes_the_same if self._is_pure else None)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            ordinary = may_be_tapped(args, kwargs)
            if not ordinary and not self._annotating.may_be_tapped(args, kwargs):
                self._note_untappable(args, kwargs)
            elif self._active():
                return self.rule.forward(self.module, self._given_tap, *args, **kwargs)
            else:
                self.note_untapped(args, kwargs)
        return self._swap.plain_forward(*args, **kwargs)

    @property
    def _is_pure(self) -> bool:
        """True if a forward may be repeated, because the layer draws no random numbers."""
        return getattr(self.rule, "traceable", False)

    @torch.no_grad()
    def _computes_the_same(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the rule computes the same with a subclass as the module with plain tensors."""
        plain_args, plain_kwargs = as_plain(args, kwargs)
        expected = self._swap.plain_forward(*plain_args, **plain_kwargs)
        try:
            found = self.rule.forward(self.module, _no_tap, *args, **kwargs)
        except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
            return False  # so the module's own forward handles the subclass
        return same_numbers(found, expected)

    def restore(self) -> None:
        """Gives the module its own class back."""
        self._swap.restore()

    @property
    def rests(self) -> bool:
        """True while forwards are the class's own and the last header's rows are sent again."""
        return self._swap.rests

    def let_rest(self, rests: bool) -> None:
        """Sets `rests`, from the next forward on."""
        self._swap.rests = rests

    def _active(self) -> bool:
        """True if this forward goes through taps; a recomputation does as the forward did."""
        if current_task() == NO_TASK:
            self._decided = self._sink.taps(self) and all(p.tappable() for p in self._trained)
            self._swap.rested = False
        return self._decided and not self._swap.rested and self._own.are_there()

    def tap(
        self,
        y: Tensor,
        a: Tensor,
        slot: int = 0,
        rows: int | None = None,
        *,
        samples: int | None = None,
        positions_first: bool = False,
    ) -> Tensor:
        """Implements `TapFn` for this layer."""
        slot %= len(self.slots)
        if type(y) is not Tensor and is_annotated(y):
            return annotated_as(
                self.tap(
                    copied(y), a, slot, rows, samples=samples, positions_first=positions_first
                ),
                y,
            )
        here = self.slots[slot]
        a = a if type(a) is Tensor else plain(a)
        if rows is None:
            rows = y.numel() // max(here.groups * here.outputs, 1)
        params = [p.parameter for p in self._watched[slot]]
        tapped: Tensor = Tap.apply(y, a, self, slot, *params)  # type: ignore[assignment]
        if current_task() == NO_TASK:  # in a recomputation only the saved tensors count
            self._live[slot].add(tapped.grad_fn, rows, tapped.dtype)
            if self._batch is not None:
                about = self._batch.samples(here.layer, samples, positions_first=positions_first)
                tapped.grad_fn.samples = about  # type: ignore[union-attr]
        return tapped

    # -- in graphs of torch.compile -------------------------------------------------------------

    def tap_in_graphs(self, *, tap_next: bool) -> None:
        """Sets whether graphs tap the layer; they are compiled again after a change."""
        self._taps_in_graphs = tap_next

    def _in_graph(self, *args: Any, **kwargs: Any) -> Any:
        """The traced forward; a graph is valid as long as the values read here are unchanged."""
        if torch._C._are_functorch_transforms_active():  # a check that dynamo can trace
            return self._swap.plain_forward(*args, **kwargs)
        taps = self._taps_in_graphs and all(p.parameter.requires_grad for p in self._trained)
        if taps and self._own.are_there():
            return self.rule.forward(self.module, self._tap_in_graph, *args, **kwargs)
        torch.ops.outergrad.rows(args[0] if args else kwargs["input"], self._key)
        return self._swap.plain_forward(*args, **kwargs)

    def _tap_in_graph(
        self,
        y: Tensor,
        a: Tensor,
        slot: int = 0,
        rows: int | None = None,
        *,
        samples: int | None = None,
        positions_first: bool = False,
    ) -> Tensor:
        """Implements `TapFn` for graphs; rows are counted when the graph runs."""
        from outergrad.capture.tracing import tap_in_graph

        slot %= len(self.slots)
        return tap_in_graph(y, a, self._key, slot, *(p.parameter for p in self._watched[slot]))

    def on_graph_use(self, slot: int, node: Any, a: Tensor, dtype: torch.dtype) -> None:
        """Adds a use in forward.

        Raises:
            RuntimeError: a hook wants to see a gradient that the graph does not compute.
        """
        if current_task() != NO_TASK or node is None:
            return
        for watched in self._watched[slot]:
            if not watched.tappable():
                raise RuntimeError(
                    f"{watched.name!r} has a hook that wants its gradient, of which the compiled "
                    f"graph knows nothing: add hooks before og.distribute()"
                )
        self._live[slot].add(node, self.rule.rows(self.module, (a,), {})[slot], dtype)

    def on_graph_rows(self, x: Tensor) -> None:
        """Counts rows of a forward without taps."""
        if current_task() == NO_TASK:
            self.note_untapped((x,), {})

    def on_graph_delta(self, slot: int, a: Tensor, delta: Tensor) -> None:
        """Takes the delta of one use, in copies: the graph will overwrite the memory.

        Raises:
            RuntimeError: for autograd.grad on weights, also by the backward of a custom function:
                the graph does not compute the requested gradient.
        """
        for watched in self._watched[slot]:
            if watched.reached() is None:
                raise RuntimeError(
                    f"torch.autograd.grad in the backward of a custom function asks a compiled "
                    f"graph for the gradient of {watched.name!r}, which is not in it: call the "
                    f"module uncompiled there, or pass og.Dense() for it"
                )
        if is_shared(NO_TASK, self._watched[slot]):
            self._hand_on(slot, self._keepers[slot].keep((a.clone(), delta.clone())), None)

    # -------------------------------------------------------------------------------------------

    def note_untapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts rows of a forward without taps: the next plan may choose factors for them."""
        if self.rests or not self._trains():
            return
        for slot, rows in enumerate(self.rule.rows(self.module, args, kwargs)):
            self._untapped[slot] += rows

    def _trains(self) -> bool:
        return any(p.parameter.requires_grad for params in self._watched for p in params)

    def _note_untappable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts a forward that cannot be tapped as more rows than factors would pay for."""
        if self._why is None:
            self._why = why_untappable(args, kwargs)
        for slot, here in enumerate(self.slots):
            self._untapped[slot] += here.outputs + here.inputs

    def forget_untapped(self) -> None:
        """Resets the counts of untapped rows, unless the layer rests, and counts none."""
        if not self._swap.rests:
            self._why = None
            self._untapped = [0] * len(self.slots)

    def is_known(self, slot: int) -> bool:
        """True if the last announcement of a slot is still valid: the layer rests without uses."""
        return self._swap.rests and not self._live[slot].any_alive()

    def announced(self, slot: int, trained: Set[str]) -> tuple[int, int, torch.dtype]:
        """Returns the rows that the current backward will capture, the untapped rows, and a dtype.

        From now on the deltas of these uses are awaited, and no others.

        Args:
            slot: index of the slot.
            trained: names of the parameters in which the backward leaves a gradient.
        """
        uses, self.untappable = self._live[slot].reached(), self._why
        if trained.isdisjoint(self._names[slot]):
            uses = []
        self._awaited[slot] = len(uses)
        if len(uses) == 1:
            return uses[0].rows, self._untapped[slot], uses[0].dtype
        dtype = reduce(torch.promote_types, (u.dtype for u in uses)) if uses else torch.float32
        return sum(use.rows for use in uses), self._untapped[slot], dtype

    def forget_awaited(self) -> None:
        """Ends a step: deltas are not counted until the next announcement."""
        self._awaited = [None] * len(self.slots)

    def _count(self, slot: int, node: Any) -> None:
        """Raises if a delta was not announced: other sites do not know of its rows."""
        awaited = self._awaited[slot]
        if awaited == 0:
            raise RuntimeError(
                f"{self.slots[slot].layer!r}: this backward brings more deltas than it had "
                f"announced to the other sites, so the step is void: call optimizer.zero_grad() "
                f"and go on; if it comes again, please report it ({self._live[slot].told(node)})"
            )
        if awaited is not None:
            self._awaited[slot] = awaited - 1

    def capture(self, ctx: Any, slot: int, delta: Tensor) -> Sequence[Tensor | None]:
        """Takes the delta of one use of a slot.

        Returns:
            Autograd's gradients of the activations and of each parameter; usually None.

        Raises:
            RuntimeError: for backward(create_graph=True) and autograd.grad on weights.
        """
        watched = self._watched[slot]
        delta = delta if type(delta) is Tensor else plain(delta)
        if is_shared(ctx.born_in, watched):
            self._hand_on(slot, self._keepers[slot].keep((ctx.saved_tensors[0], delta)), ctx)
            return [None] * (1 + len(watched))
        factors_of = partial(self.rule.factors, self.module, slot)
        return returned(ctx, self.slots[slot], watched, factors_of, delta)

    def _hand_on(self, slot: int, kept: Kept, node: Any) -> None:
        factors = partial(kept.factors, self.rule, self.module, slot)
        samples = getattr(node, "samples", None)  # unknown in graphs of torch.compile
        if samples is not None:
            factors = SampledUse(factors, self.rule, self.module, slot, kept, samples)
        self._sink.on_factors(self.slots[slot], factors)
        self._count(slot, node)


def _no_tap(y: Tensor, *_: Any, **__: Any) -> Tensor:
    """Implements `TapFn` without capturing anything."""
    return y
