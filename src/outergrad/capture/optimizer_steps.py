"""Every reliance on the inside of optimizers: who hears of their steps, and how they are counted.

PyTorch's hooks for all optimizers of the process are registered once and stay: ranks may be
threads, and a hook that comes or goes while another thread runs through them would end its step.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
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
    """Who is told of the steps of all optimizers in this process."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        ...

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        ...

    def skipped_step(self, optimizer: Optimizer) -> None:
        """A `GradScaler` has found an overflow and did not let it step."""
        ...


class Looking(Protocol):
    """Who looks at what an optimizer is about to apply."""

    def before_applying(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        ...


class _Refs:
    """Weakly held, in the order in which they came."""

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
    """Also of steps within steps; graphs of torch.compile take no notice of them."""

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            for r in self._refs:
                if (looking := r()) is not None:
                    looking.before_applying(optimizer)


class _Listeners(_Refs):
    """Who counts steps; where there is somebody, a graph of torch.compile breaks for it."""

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
        """Nobody in a step that another optimizer's step makes: it is part of that one.

        Only one at a time is held: while it waits for other sites, which may be threads, theirs
        may have to go.
        """
        return () if _depth() > 1 else self._refs


_LISTENERS, _LOOKERS = _Listeners(), _Lookers()
_ATTEMPT = local()
"""Of a thread: whether an optimizer has stepped since a `GradScaler` was asked to."""
_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""The code of every optimizer's `step`, which calls the hooks."""


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_LISTENERS.before_step)
    register_optimizer_step_post_hook(_LISTENERS.after_step)
    GradScaler.step = _telling_of_skips(GradScaler.step)


def _telling_of_skips(step: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.step`, which calls no hook where it does not let an optimizer step."""

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
    """Tells it of every step of an optimizer, as long as it lives or until `ignore`."""
    _install()
    _LISTENERS.add(listener)


def ignore(listener: StepListener) -> None:
    """Tells it nothing any more."""
    _LISTENERS.remove(listener)


def look_at_steps(looking: Looking) -> None:
    """Shows it every optimizer that is about to step, as long as it lives or until `look_away`."""
    _install_look()
    _LOOKERS.add(looking)


def look_away(looking: Looking) -> None:
    """Shows it nothing any more."""
    _LOOKERS.remove(looking)


def held(optimizer: Optimizer) -> set[int]:
    """Identities of its parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def held_by_any(names: Mapping[int, str]) -> set[str]:
    """Which parameters some optimizer of this process holds; looks through all its objects.

    Args:
        names: of the parameters, by identity.
    """
    # Not gc.get_objects(): a reference to a tuple that another thread is just filling in C fails
    # there with a SystemError. Instances refer to their class.
    referrers = gc.get_referrers(*_kinds(Optimizer))
    optimizers = (o for o in referrers if issubclass(type(o), Optimizer))
    return {names[key] for o in optimizers for key in names.keys() & held(o)}


def _kinds(kind: type) -> list[type]:
    return [kind, *(further for below in kind.__subclasses__() for further in _kinds(below))]


class _Holders:
    """Knows optimizers by the parameters of a model that they hold.

    Args:
        names: of the parameters, by identity.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def holder(self, optimizer: Optimizer) -> str | None:
        """The first name of a parameter that it holds; None if it holds nothing of the model."""
        own = held(optimizer)
        return next((name for key, name in self._names.items() if key in own), None)


class SeenOptimizers(_Holders):
    """Remembers, weakly, the optimizers that hold parameters of a model and were seen to step."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(names)
        self._found = dict[str, ref[Optimizer]]()

    @property
    def present(self) -> dict[str, Optimizer]:
        """Those that are left, by the first parameter that they hold, in the order of names."""
        alive = {name: found() for name, found in sorted(self._found.items())}
        return {name: optimizer for name, optimizer in alive.items() if optimizer is not None}

    def before_step(self, optimizer: Optimizer) -> None:
        """Nothing: it may yet be skipped."""

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Nothing: it has no state of it."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        holder = self.holder(optimizer)
        if holder is not None:
            self._found[holder] = ref(optimizer)


SAID = "session.stepped()"
"""Stands for an optimizer among those that are counted: the user says that a step was made."""


class StepCounter(_Holders):
    """Counts the steps of the optimizers that hold parameters of a model.

    With several, an exchange is due when all of them have made k steps since the last one. One
    that falls behind is waited for only until another has made k + 1, and one that did not step at
    all between two exchanges is forgotten: so none can keep the sites apart for good.

    Args:
        params: of the model, by name.
        k: steps between two exchanges.
    """

    def __init__(self, params: Mapping[str, Tensor], k: int) -> None:
        super().__init__({id(p): name for name, p in params.items()})
        self._k, self._params = k, params
        self._held = set[int]()
        self.made: dict[str, int] = {}
        """Steps since the last exchange, by the first parameter that an optimizer holds."""

    def holder(self, optimizer: Optimizer) -> str | None:
        """Also one that holds a flat tensor of which parameters are parts, as `p.data`."""
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
        """Names of the parameters that no optimizer holds which was seen to step."""
        return [name for name, p in self._params.items() if id(p) not in self._held]

    def count(self, holder: str) -> None:
        """One more step; one that is only said to be made is of all that were seen to step."""
        seen = [one for one in self.made if one != SAID] if holder == SAID else []
        for one in seen or [holder]:
            self.made[one] = self.made.get(one, 0) + 1

    @property
    def any_made(self) -> bool:
        """Whether there has been a step since the last exchange."""
        return any(self.made.values())

    @property
    def due(self) -> bool:
        """Whether it is time for an exchange."""
        return self.reached(self._k)

    def reached(self, steps: int) -> bool:
        """Whether so many have been made since the last exchange, by the same rule."""
        made = self.made.values()
        return self.any_made and (min(made) >= steps or max(made) > steps)

    def restart(self) -> None:
        """An exchange has taken place."""
        self.made = {holder: 0 for holder, steps in self.made.items() if steps}


def _storage(tensor: Tensor) -> int:
    """Where its memory begins; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or of a subclass without storage
        return 0
