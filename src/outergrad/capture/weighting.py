"""Weight of a site's gradient in the mean: equal for all sites, or its number of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from outergrad.capture.class_swap import ClassSwap
from outergrad.capture.engine import NO_TASK, current_task
from outergrad.capture.untappable import is_vmapped
from outergrad.core.types import StateDict

Kind = Literal["sites", "samples"]
KINDS: tuple[Kind, ...] = ("sites", "samples")


class Weighting:
    """Weight of this site in the next shared step.

    By samples, it is the first dimension of the first tensor that the model is called with, summed
    over the forwards with gradients enabled since the last shared step. A count from the loop
    (`say`) replaces it. If the forward ran before the last shared step, the weight is that step's.
    Inside `torch.vmap` samples cannot be counted: there the loop has to give the count.

    Args:
        kind: "sites" for equal weights, or "samples".
    """

    def __init__(self, kind: Kind = "sites") -> None:
        self._kind = kind
        self._counted: int | None = None
        self._said: int | None = None
        self._last: int | None = None
        self._swap: ClassSwap | None = None

    def watch(self, model: nn.Module) -> None:
        """Counts the samples of the model's forwards from now on, if sites are weighted by them."""
        if self._kind == "samples":
            self._swap = ClassSwap(model, self._forward)

    @property
    def is_even(self) -> bool:
        """True if all sites always have equal weights."""
        return self._kind == "sites"

    @property
    def weight(self) -> int:
        """Weight of this site.

        Raises:
            RuntimeError: nothing was counted yet.
        """
        if self._kind == "sites":
            return 1
        found = (n for n in (self._said, self._counted, self._last) if n is not None)
        weight = next(found, None)
        if weight is None:
            raise RuntimeError(
                "weighting='samples': the model itself was not called with a tensor before this "
                "backward, outside of torch.vmap, so its samples are not known: call "
                "session.samples(n) before it"
            )
        return weight

    def take(self) -> int:
        """Returns the weight of this site in the step that begins, and restarts the count.

        Later samples count for the next step, even if the backward of this one raises.

        Raises:
            RuntimeError: nothing was counted yet.
        """
        weight = self.weight
        self.settle()
        return weight

    def say(self, n: int) -> None:
        """Adds n samples to the loop's own count, which replaces the count of the forwards.

        Raises:
            RuntimeError: sites have equal weights.
            ValueError: n is not a number of samples.
        """
        if self._kind != "samples":
            raise RuntimeError("samples(n) needs og.distribute(..., weighting='samples')")
        if not isinstance(n, int | float | Tensor) or int(n) != n or n < 0:
            raise ValueError(f"samples({n}): pass a whole number, 0 or more")
        self._said = (self._said or 0) + int(n)

    def settle(self) -> None:
        """Restarts the counts after a shared step, and remembers its weight."""
        if self._kind == "samples" and (self._said, self._counted) != (None, None):
            self._last = self.weight
        self._said = self._counted = None

    def remove(self) -> None:
        """Stops counting and gives the model its own class back."""
        if self._swap is not None:
            self._swap.restore()

    def state(self) -> StateDict:
        """Returns the counts since the last shared step, and that step's weight."""
        counts = {"counted": self._counted, "said": self._said, "last": self._last}
        return {what: n for what, n in counts.items() if n is not None}

    def load(self, state: StateDict) -> None:
        """Restores the counts from `state`."""
        self._counted, self._said = state.get("counted"), state.get("said")
        self._last = state.get("last")

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_vmapped():  # a tensor shows a single sample there
            self._last = None
        elif torch.is_grad_enabled() and current_task() == NO_TASK:
            n = samples_in([*args, *kwargs.values()])
            self._counted = self._counted if n is None else (self._counted or 0) + n
        assert self._swap is not None
        return self._swap.plain_forward(*args, **kwargs)


def samples_in(values: Iterable[Any]) -> int | None:
    """Returns the size of the first dimension of the first tensor that has one, or None."""
    for value in values:
        if isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
        if isinstance(value, Tensor) and value.dim():
            return len(value)
        items = value.values() if isinstance(value, Mapping) else value
        found = samples_in(items) if isinstance(value, Mapping | list | tuple) else None
        if found is not None:
            return found
    return None
