"""Gradients that a backward writes itself, bypassing autograd (fused accumulation)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

import torch
from torch import Tensor

from outergrad.capture.changes import Change
from outergrad.capture.parameters import NO_GRADIENT, WatchedParameter

_FUSED = (
    "turn fused accumulation off (gradient_accumulation_fusion=False), or let the backward return "
    "the gradient of a weight that it takes as an input"
)


class PastAutograd:
    """Finds gradients that a custom function's backward adds to `w.grad` or `w.main_grad` itself.

    Such a backward returns None, so autograd reports no gradient. The value of `param.grad` when
    autograd has nothing more for the parameter is sent in the dense part of the step. Gradients
    that cannot be sent are refused: those of parameters that the backward does not reach, and
    `main_grad`.

    Args:
        watched: the parameters of the model, by name.
        captured: names of the parameters that may be sent as factors, without `param.grad`.
    """

    def __init__(self, watched: Mapping[str, WatchedParameter], captured: Collection[str]) -> None:
        self._watched = watched
        self._captured = [watched[name] for name in captured]
        self._before: Sequence[tuple[int, int]] = ()
        """States of `param.grad` when autograd was called, until `written` compares them."""
        self._unreached: dict[WatchedParameter, tuple[int, int]] = {}
        self._main: Mapping[WatchedParameter, Tensor] | None = None
        """Copies of `main_grad`, if these are checked."""

    def called(self, *, looks: bool) -> None:
        """Records the gradients when autograd is called: later writes are the backward's.

        Args:
            looks: True to check `main_grad`, too. Its values are copied, as fused kernels write
                without raising the version counter.
        """
        self._before = self._states() if self._captured else ()
        copies = {w: t.detach().clone() for w, t in self._main_grads().items()} if looks else None
        self._main = copies

    def written(self) -> list[str]:
        """Returns names of captured parameters whose `param.grad` has changed since `called`."""
        before, self._before = self._before, ()  # also empty if autograd was called from C++
        if not before or before == (states := self._states()):
            return []
        pairs = zip(self._captured, before, states, strict=True)
        return [w.name for w, state, now in pairs if state != now]

    def _states(self) -> list[tuple[int, int]]:
        # The same as WatchedParameter.state_of_grad, without a call per parameter.
        return [
            NO_GRADIENT if (g := w.parameter.grad) is None else (id(g), g._version)
            for w in self._captured
        ]

    def begin(self, used: Set[str]) -> None:
        """Records the gradients when a backward has begun and kept ones are back in `param.grad`.

        Args:
            used: names of the parameters in which the backward leaves a gradient.
        """
        self._unreached = {}
        if self._captured:
            for w, state in zip(self._captured, self._states(), strict=True):
                w.marked = state
        if len(used) < len(self._watched):
            rest = (w for name, w in self._watched.items() if name not in used)
            self._unreached = {w: w.state_of_grad() for w in rest}

    def refused(self) -> Change | None:
        """Returns, at the end of a backward, a gradient it wrote that no other site would get."""
        unreached, main, self._unreached, self._main = self._unreached, self._main, {}, None
        for w, state in unreached.items():
            if w.parameter.grad is not None and w.state_of_grad() != state:
                what = "got a gradient in a backward that does not reach it"
                return Change(w.name, what, remedy=_FUSED)
        if main is None:
            return None
        for w, now in self._main_grads().items():
            if w not in main or not _is_equal(now, main[w]):
                return Change(w.name, "got a gradient in main_grad by a backward", remedy=_FUSED)
        return None

    def _main_grads(self) -> dict[WatchedParameter, Tensor]:
        return {
            w: main
            for w in self._watched.values()
            if isinstance(main := w.parameter.__dict__.get("main_grad"), Tensor)
        }


def _is_equal(now: Tensor, before: Tensor) -> bool:
    if (now.shape, now.dtype) != (before.shape, before.dtype):
        return False
    return torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
