"""Looks at whether the model still is what the sites agreed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from weakref import ref

from torch import nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from outergrad.capture.changes import Change, Look, ModelWatch
from outergrad.capture.class_swap import CallSwap
from outergrad.capture.node_ref import holds_nodes
from outergrad.capture.parameters import WatchedParameter, hold_again


class ModelGuard:
    """Finds parameters, buffers and modules that were replaced after `distribute`.

    It looks when the model is called, when a backward begins of which no call was seen or which
    misses a parameter, and before an optimizer's step. If every parameter was replaced, autograd
    tells nothing; where only parts of the model or its graph are called, nor does a call.

    Args:
        watched: the trained parameters, by name.
        follows_nodes: True to watch autograd's nodes of the parameters, too.
    """

    def __init__(self, watched: Mapping[str, WatchedParameter], *, follows_nodes: bool) -> None:
        self._watched, self._follows_nodes = watched, follows_nodes
        self._model_watch: Callable[[], ModelWatch | None] = lambda: None
        self._kept_watch: ModelWatch | None = None
        self._swap: CallSwap | None = None
        self._thread = 0
        self._called = self._began = False
        self._holds_nodes = True
        holds_nodes(self)

    @property
    def is_here(self) -> bool:
        """True in the thread that distributed the model."""
        return get_ident() == self._thread

    def watch(
        self, model: nn.Module, watch: ModelWatch, on_call: Callable[[ModelWatch], None]
    ) -> None:
        """Begins to look at a model, which from now on keeps `watch` alive.

        Args:
            model: the model.
            watch: finds its changes.
            on_call: is called before each of its forwards.
        """
        if self._watched and self._follows_nodes:
            watch.follow(hold_again(self._watched.values()))
        self._model_watch, self._thread = ref(watch), get_ident()
        try:
            self._swap = CallSwap(model, lambda: on_call(watch))
        except TypeError:  # a class that allows no subclass: backward and optimizers remain
            self._kept_watch = watch

    def keep(self, watch: ModelWatch) -> None:
        """Looks before an optimizer's step alone."""
        self._kept_watch, self._thread = watch, get_ident()
        self._model_watch = lambda: self._kept_watch

    def forget(self) -> None:
        """Ends the looking; no node of autograd is held any more."""
        watch = self._model_watch()
        if watch is not None:
            watch.unfollow()
        if self._swap is not None:
            self._swap.restore()
            self._swap = None

    # -- looks ----------------------------------------------------------------------------------

    def at_call(self, watch: ModelWatch) -> Change | None:
        """Looks before a forward."""
        change = watch.wrapped() or watch.change(Look.KINDS)
        self._called = self._called or change is None
        return change

    def at_begin(self, used: Set[str]) -> Change | None:
        """Looks when a backward begins that leaves gradients in these parameters."""
        change = None
        if not (self._called and len(used) == len(self._watched)):
            change = self.change()
        if change is None:
            self._called, self._began = False, True
        return change

    def before_applying(self, optimizer: Optimizer) -> Change | None:
        """Looks before an optimizer applies gradients, maybe of a backward nobody heard of."""
        watch = self._model_watch() if self.is_here else None
        if watch is None:
            return None
        is_own = self._began or watch.held_some_of(optimizer)
        change = watch.change(Look.NODES if is_own and not self._began else Look.NONE)
        self._began = False
        return change if change is not None and watch.holds_some_of(optimizer) else None

    def change(self) -> Change | None:
        """Returns the first change, by a look at everything."""
        watch = self._model_watch()
        return None if watch is None else watch.change()

    def as_agreed(self) -> AbstractContextManager[None]:
        """Returns a context in which the model is as the sites agreed on it."""
        watch = self._model_watch()
        return nullcontext() if watch is None else watch.as_agreed()

    # -- nodes of autograd ------------------------------------------------------------------------

    def let_go_of_nodes(self) -> None:
        """Lets go of autograd's nodes while Python's garbage collector looks at the session."""
        self._holds_nodes = False
        for watched in self._watched.values():
            watched.let_go()
        watch = self._model_watch()
        if watch is not None:
            watch.let_go()

    def hold_nodes(self) -> None:
        """Holds the nodes of the graph of now, unless they are held."""
        if self._holds_nodes or not self._watched:
            return
        self._holds_nodes = True
        nodes: Sequence[Node | None] = hold_again(self._watched.values())
        watch = self._model_watch()
        if nodes and watch is not None:
            watch.hold_again(nodes)
