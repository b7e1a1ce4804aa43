"""Listeners to optimizer steps, and step counters: all that relies on optimizers' internals.

PyTorch's hooks for all optimizers of the process are registered once and stay. Ranks may be
threads, and adding or removing a hook while another thread iterates over them would make that
thread's step raise.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from threading import Lock, local
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class StepListener(Protocol):
    """Receives the steps of all optimizers in this process."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before an optimizer steps."""
        ...

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after an optimizer has stepped."""
        ...

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Called when a `GradScaler` has skipped an optimizer's step because of an overflow."""
        ...


class Looking(Protocol):
    """Inspects the gradients that an optimizer is about to apply."""

    def before_applying(self, optimizer: Optimizer) -> None:
        """Called before an optimizer steps."""
        ...

    def before_unscaling(self, optimizer: Optimizer) -> None:
        """Called before a `GradScaler` divides an optimizer's gradients by its scale and steps."""
        ...


class _Refs:
    """Weak references, in the order of registration."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._refs: tuple[ref[Any], ...] = ()

    def add(self, listener: Any) -> None:
        with self._lock:
            self._refs = (*(r for r in self._refs if r() is not None), ref(listener))

    def remove(self, listener: Any) -> None:
        with self._lock:
            self._refs = tuple(r for r in self._refs if r() not in (None, listener))


class _Lookers(_Refs):
    """Registered inspections; nested steps are shown, too, but none in a graph of torch.compile."""

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            for r in self._refs:
                if (looking := r()) is not None:
                    looking.before_applying(optimizer)

    def before_unscaling(self, optimizer: Optimizer) -> None:
        for r in self._refs:
            if (looking := r()) is not None:
                looking.before_unscaling(optimizer)


class _Listeners(_Refs):
    """Registered step listeners; if there are any, a step breaks a graph of torch.compile."""

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._refs:
            _outside_graphs(self._tell_before, optimizer)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        _ATTEMPT.stepped = True
        if self._refs:
            _outside_graphs(self._tell_after, optimizer)

    def skipped(self, optimizer: Optimizer) -> None:
        for r in self._refs:
            if (listener := r()) is not None:
                listener.skipped_step(optimizer)

    def _tell_before(self, optimizer: Optimizer) -> None:
        for r in self._present():
            if (listener := r()) is not None:
                listener.before_step(optimizer)

    def _tell_after(self, optimizer: Optimizer) -> None:
        for r in self._present():
            if (listener := r()) is not None:
                listener.after_step(optimizer)

    def _present(self) -> tuple[ref[Any], ...]:
        """Returns the listeners, but none in a nested step: it is part of the outer optimizer's.

        They are weak references, of which callers resolve one at a time: a listener may wait for
        other sites in threads of this process, whose own listeners may have to be freed meanwhile.
        """
        return () if _depth() > 1 else self._refs


_LISTENERS, _LOOKERS = _Listeners(), _Lookers()
_ATTEMPT = local()
"""Per thread: `stepped` is true if an optimizer has stepped since `GradScaler.step` was called."""
_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""Code of PyTorch's wrapper around every optimizer's `step`, which calls the hooks."""


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_LISTENERS.before_step)
    register_optimizer_step_post_hook(_LISTENERS.after_step)
    GradScaler.step = _telling_of_skips(GradScaler.step)


def _telling_of_skips(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `GradScaler.step`, which calls no hook when it skips an optimizer's step."""

    @wraps(step)
    def told(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        _ATTEMPT.stepped = False
        result = step(scaler, optimizer, *args, **kwargs)
        if not _ATTEMPT.stepped:
            _LISTENERS.skipped(optimizer)
        return result

    return told


@cache
def _install_look() -> None:
    register_optimizer_step_pre_hook(_LOOKERS.before_step)
    GradScaler.step = _telling_before(GradScaler.step)


def _telling_before(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `GradScaler.step`, which has no hook before it unscales."""

    @wraps(step)
    def told(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            _LOOKERS.before_unscaling(optimizer)
        return step(scaler, optimizer, *args, **kwargs)

    return told


def _outside_graphs(tell: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    if torch.compiler.is_dynamo_compiling():
        from outergrad.capture.tracing import step_outside_graphs

        step_outside_graphs(tell, optimizer)
    else:
        tell(optimizer)


def _depth() -> int:
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + (frame.f_code is _STEP), frame.f_back
    return depth


def listen(listener: StepListener) -> None:
    """Notifies a listener, held weakly, of every optimizer step until `ignore`."""
    _install()
    _LISTENERS.add(listener)


def ignore(listener: StepListener) -> None:
    """Stops the notifications of a listener."""
    _LISTENERS.remove(listener)


def look_at_steps(looking: Looking) -> None:
    """Shows every optimizer that is about to step to an object, held weakly, until `look_away`."""
    _install_look()
    _LOOKERS.add(looking)


def look_away(looking: Looking) -> None:
    """Stops the inspections of an object."""
    _LOOKERS.remove(looking)


def held(optimizer: Optimizer) -> set[int]:
    """Returns the ids of an optimizer's parameters; none of one that is not made yet.

    `held_by_any` finds those that another thread is just making, and those that could not be made.
    """
    groups = getattr(optimizer, "param_groups", ())
    return {id(p) for group in groups for p in group["params"]}


def held_by_any(names: Mapping[int, str]) -> set[str]:
    """Returns names of parameters that any optimizer of this process holds; searches all objects.

    Args:
        names: full names of the parameters, by id.
    """
    # Instances refer to their class. gc.get_objects() would do, but fails with a SystemError on a
    # tuple that another thread is just filling in C.
    referrers = gc.get_referrers(*_kinds(Optimizer))
    optimizers = (o for o in referrers if issubclass(type(o), Optimizer))
    return {names[key] for o in optimizers for key in names.keys() & held(o)}


def _kinds(kind: type) -> list[type]:
    return [kind, *(further for below in kind.__subclasses__() for further in _kinds(below))]


class _Holders:
    """Identifies optimizers by the parameters of a model that they hold.

    Args:
        names: full names of the parameters, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def holder(self, optimizer: Optimizer) -> str | None:
        """Returns the first parameter of the model that an optimizer holds, by name, or None."""
        own = held(optimizer)
        return next((name for key, name in self._names.items() if key in own), None)


class SeenOptimizers(_Holders):
    """Weak references to the optimizers that hold parameters of a model and have stepped."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(names)
        self._found = dict[str, ref[Optimizer]]()

    @property
    def present(self) -> dict[str, Optimizer]:
        """Living optimizers, by the first parameter that each holds, sorted by its name."""
        alive = {name: found() for name, found in sorted(self._found.items())}
        return {name: optimizer for name, optimizer in alive.items() if optimizer is not None}

    def before_step(self, optimizer: Optimizer) -> None:
        """Does nothing: the step may still be skipped."""

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Does nothing: a skipped step creates no optimizer state."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Remembers an optimizer of the model."""
        holder = self.holder(optimizer)
        if holder is not None:
            self._found[holder] = ref(optimizer)


SAID = "session.stepped()"
"""Key of `StepCounter.made` for steps that the user reports, in place of an optimizer's."""


class StepCounter(_Holders):
    """Counts the steps of the optimizers that hold parameters of a model.

    With several, an exchange is due when all have made k steps since the last one. An optimizer
    that falls behind is waited for only until another has made k + 1 steps. An optimizer that made
    no step between two exchanges is forgotten. So none can prevent exchanges for good.

    Args:
        params: parameters of the model, by name.
        k: number of steps between two exchanges.
    """

    def __init__(self, params: Mapping[str, Tensor], k: int) -> None:
        super().__init__({id(p): name for name, p in params.items()})
        self._k, self._params = k, params
        self._held = set[int]()
        self.made: dict[str, int] = {}
        """Steps since the last exchange, by the first parameter that an optimizer holds."""

    def holder(self, optimizer: Optimizer) -> str | None:
        """Returns the first parameter that is held, by name, whole or as part of a flat tensor."""
        own = [p for group in optimizer.param_groups for p in group["params"]]
        self._held.update(self._names.keys() & map(id, own))
        found = super().holder(optimizer)
        if found is not None:
            return found
        flat = {_storage(p) for p in own} - {0}
        parts = [name for name, p in self._params.items() if _storage(p) in flat]
        self._held.update(id(self._params[name]) for name in parts)
        return parts[0] if parts else None

    @property
    def unheld(self) -> list[str]:
        """Names of the parameters that no optimizer seen so far holds."""
        return [name for name, p in self._params.items() if id(p) not in self._held]

    def count(self, holder: str) -> None:
        """Counts a step; one that the user reports counts for all optimizers counted so far."""
        seen = [one for one in self.made if one != SAID] if holder == SAID else []
        for one in seen or [holder]:
            self.made[one] = self.made.get(one, 0) + 1

    @property
    def any_made(self) -> bool:
        """True if a step was counted since the last exchange."""
        return any(self.made.values())

    @property
    def due(self) -> bool:
        """True if an exchange is due."""
        return self.reached(self._k)

    def reached(self, steps: int) -> bool:
        """True if an exchange would be due with this number of steps for k."""
        made = self.made.values()
        return self.any_made and (min(made) >= steps or max(made) > steps)

    def resume(self, made: Mapping[str, int]) -> None:
        """Continues from saved counts."""
        self.made = dict(made)

    def restart(self) -> None:
        """Starts a new count after an exchange; forgets optimizers that made no step."""
        self.made = {holder: 0 for holder, steps in self.made.items() if steps}


def _storage(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or of a subclass without storage
        return 0


class LoopWatch(SeenOptimizers):
    """Records the steps of the optimizers that hold parameters of a model.

    The pattern of one loop is remembered for the next, in which this site may have no batch.

    Args:
        names: full names of the parameters, by id.
        steps: returns the number of shared steps so far.
    """

    def __init__(self, names: Mapping[int, str], steps: Callable[[], int]) -> None:
        super().__init__(names)
        self._steps = steps
        self._stepped: dict[int, list[str]] = {}
        self._first, self._heeds = 0, True
        self._usual: tuple[str, ...] = ()

    def begin(self) -> None:
        """Starts to record a loop."""
        self._first = self._steps()
        self._stepped.clear()
        listen(self)

    def end(self) -> None:
        """Stops recording, once the loop is over on all sites."""
        ignore(self)

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """Context in which optimizer steps do not count as the loop's."""
        self._heeds = False
        try:
            yield
        finally:
            self._heeds = True

    def learn(self) -> None:
        """Learns, after this site's loop, the optimizers it stepped; none if steps differed."""
        made = range(self._first + 1, self._steps() + 1)
        patterns = {tuple(self._stepped.get(step, ())) for step in made}
        if patterns:
            self._usual = patterns.pop() if len(patterns) == 1 else ()

    def repeat(self) -> None:
        """Steps the optimizers that the loop steps after each shared step."""
        optimizers = self.present
        for name in self._usual:
            if name in optimizers:
                optimizers[name].step()

    def after_step(self, optimizer: Optimizer) -> None:
        """Records the step of an optimizer."""
        holder = self.holder(optimizer)
        if holder is not None and self._heeds:
            super().after_step(optimizer)
            self._stepped.setdefault(self._steps(), []).append(holder)
