"""State that is saved beside the session: model, optimizer and others, and its local part."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from outergrad.core.types import StateDict, Stateful


def random_state() -> StateDict:
    """Returns the random states of torch (CPU, and CUDA if in use), NumPy and Python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    words = np.asarray(keys, np.int64)
    version, numbers, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [kind, torch.from_numpy(words), position, has_gauss, gauss],
        "python": [version, list(numbers), next_gauss],
    }


def set_random_state(state: StateDict) -> None:
    """Sets the random states; those of CUDA only if there are as many devices."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers), next_gauss))


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
        optimizer, and names of generators and of parts that have `own_to_site`.
        """
        own = [name for name, part in self._parts.items() if _is_own(part)]
        return {
            "parts": {name: _state(part) for name, part in self._parts.items()},
            "own": {"model": sorted(self._local), "optimizer": self._slots(), "parts": own},
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
            if name in states:
                self._load_one(name, part, states[name], new=new)
            elif not (new and _is_own(part)):
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


def _is_own(part: Saveable) -> bool:
    """True if the state of a part is a secret of its site, as the seed of what it draws."""
    return isinstance(part, torch.Generator) or getattr(part, "own_to_site", False)


def _state(part: Saveable) -> Any:
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
