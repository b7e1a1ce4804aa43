"""How much a site's gradient counts: as every other's, or by its samples."""

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
    """The weight of this site in the next shared step.

    By samples it is the first dimension of the first tensor that the model is called with, added
    up over the forwards with a gradient since the last shared step, unless the loop says better.
    A backward of which the forward ran before the last shared step counts as that one did. Inside
    of `torch.vmap` samples are not seen: there the loop has to say.

    Args:
        kind: "sites", all alike, or "samples".
    """

    def __init__(self, kind: Kind = "sites") -> None:
        self._kind = kind
        self._counted: int | None = None
        self._said: int | None = None
        self._last: int | None = None
        self._swap: ClassSwap | None = None

    def watch(self, model: nn.Module) -> None:
        """Counts the samples of its forwards from now on, if that is what sites count by."""
        if self._kind == "samples":
            self._swap = ClassSwap(model, self._forward)

    @property
    def is_even(self) -> bool:
        """Whether all sites always count alike."""
        return self._kind == "sites"

    @property
    def weight(self) -> int:
        """Of this site.

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
        """Of this site in the step that begins.

        What is counted from now on is for the next, also if the backward of this one raises.

        Raises:
            RuntimeError: nothing was counted yet.
        """
        weight = self.weight
        self.settle()
        return weight

    def say(self, n: int) -> None:
        """Counts samples in place of what the forwards would count.

        Raises:
            RuntimeError: sites count alike.
            ValueError: it is no number of samples.
        """
        if self._kind != "samples":
            raise RuntimeError("samples(n) needs og.distribute(..., weighting='samples')")
        if not isinstance(n, int | float | Tensor) or int(n) != n or n < 0:
            raise ValueError(f"samples({n}): pass a whole number, 0 or more")
        self._said = (self._said or 0) + int(n)

    def settle(self) -> None:
        """The shared step is over."""
        if self._kind == "samples" and (self._said, self._counted) != (None, None):
            self._last = self.weight
        self._said = self._counted = None

    def remove(self) -> None:
        """Counts no more."""
        if self._swap is not None:
            self._swap.restore()

    def state(self) -> StateDict:
        """What was counted since the last shared step."""
        counts = {"counted": self._counted, "said": self._said, "last": self._last}
        return {what: n for what, n in counts.items() if n is not None}

    def load(self, state: StateDict) -> None:
        """Goes on from there."""
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
    """The first dimension of the first tensor that has one; None without any."""
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
