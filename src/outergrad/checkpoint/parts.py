"""State that is saved beside the session: model, optimizer and others, and its local part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outergrad.checkpoint.random_state import random_state
from outergrad.core.types import StateDict, Stateful

Saveable = Stateful | torch.Generator
"""Objects that can be saved."""


class Parts:
    """Objects whose state is saved, by name.

    Args:
        parts: the objects; state local to this site is looked for in "model" and "optimizer".
        local: names of parameters and buffers that each site keeps to itself.

    Raises:
        TypeError: an object has no state.
    """

    def __init__(self, parts: Mapping[str, Saveable], local: Collection[str]) -> None:
        self._parts, self._local = dict(parts), frozenset(local)
        for name, part in parts.items():
            if not isinstance(part, torch.Generator) and not hasattr(part, "load_state_dict"):
                raise TypeError(
                    f"{name}={part!r} cannot be saved: pass what has state_dict() and "
                    f"load_state_dict(), or a torch.Generator"
                )

    @property
    def names(self) -> list[str]:
        """Sorted names of the parts."""
        return sorted(self._parts)

    def state(self) -> StateDict:
        """Returns the states of all parts, which of them are local, and the random streams.

        Local state, which no other site may get, is listed as names in the model, indices in the
        optimizer, and names of generators.
        """
        generators = [n for n, part in self._parts.items() if isinstance(part, torch.Generator)]
        return {
            "parts": {name: _state(part) for name, part in self._parts.items()},
            "own": {"model": sorted(self._local), "optimizer": self._slots(), "parts": generators},
            "random": random_state(),
        }

    def _slots(self) -> list[int]:
        """Returns the indices of local parameters in the optimizer's state."""
        model, optimizer = self._parts.get("model"), self._parts.get("optimizer")
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            return []
        own = {id(p) for name, p in model.named_parameters() if name in self._local}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return [index for index, p in enumerate(params) if id(p) in own]

    def load(self, states: StateDict, *, new: bool) -> None:
        """Loads saved states; those for a new site lack what is local to another site.

        Raises:
            ValueError: other parts were saved, or they do not fit.
        """
        for name, part in self._parts.items():
            generator = isinstance(part, torch.Generator)
            if name in states:
                self._load_one(name, part, states[name], new=new)
            elif not (new and generator):
                raise ValueError(
                    f"the checkpoint holds {', '.join(sorted(states))}, but no {name!r}: save and "
                    f"restore the same parts"
                )

    def _load_one(self, name: str, part: Saveable, state: Any, *, new: bool) -> None:
        try:
            if isinstance(part, torch.Generator):
                part.set_state(state)
            elif new and isinstance(part, nn.Module):
                part.load_state_dict({**part.state_dict(), **state})
            else:
                part.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name!r} does not fit what was saved: {error}") from error


def for_a_new_site(states: StateDict, own: StateDict) -> StateDict:
    """Returns the states for a site that saved nothing, without what is local to another site.

    Args:
        states: states of all parts.
        own: local state, as `Parts.state` listed it when they were saved.
    """
    found = {name: state for name, state in states.items() if name not in own["parts"]}
    if own["model"]:
        found["model"] = {k: v for k, v in found["model"].items() if k not in own["model"]}
    if own["optimizer"]:
        kept = {k: v for k, v in found["optimizer"]["state"].items() if k not in own["optimizer"]}
        found["optimizer"] = {**found["optimizer"], "state": kept}
    return found


def _state(part: Saveable) -> Any:
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
