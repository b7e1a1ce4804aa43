"""Outer steps of `og.Gossip`: a rate and a momentum of what a site's own steps have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from outergrad.core.types import StateDict


class OuterMomentum:
    """Makes y = start + lr (now - start) before an exchange, and adds momentum (y - last y) to it.

    `start` is what the last exchange left. The last y is at first `start`, too. Without letters
    this is SGD with Nesterov's momentum, whose gradient is `start - now`. What letters move is a
    part of the next y - last y, so that momentum is also in how sites come nearer to each other.
    Source: GASLoC, arXiv 2606.11081, where lr is η and momentum γ.

    Args:
        params: the weights, which it changes in place.
        lr: the rate; with 1 it keeps no copy of `start`.
        momentum: 0 or more and less than 1; with 0 it keeps no copy of the last y.
    """

    def __init__(self, params: Sequence[Tensor], lr: float, momentum: float) -> None:
        self._params = params
        self._lr, self._momentum = lr, momentum
        self._start, self._last = list[Tensor](), list[Tensor]()
        self._velocity = list[Tensor]()
        self.start_here()

    def start_here(self) -> None:
        """Forgets all steps so far: the weights of now are `start` and the last y."""
        self._start = self._copies() if self._lr != 1 else []
        self._last = self._copies() if self._momentum else []

    def begin(self) -> None:
        """Makes the weights y, which neighbours are told of."""
        if self._start:
            for p, start in zip(self._weights, self._start, strict=True):
                p.sub_(start).mul_(self._lr).add_(start)
        if self._last:
            now = self._copies()
            self._velocity = [y - last for y, last in zip(now, self._last, strict=True)]
            self._last = now

    def end(self) -> None:
        """Adds the momentum of this y; the weights are then the next `start`."""
        if self._velocity:
            for p, v in zip(self._weights, self._velocity, strict=True):
                p.add_(v, alpha=self._momentum)
        self._velocity = []
        if self._start:
            self._start = self._copies()

    def moved(self, by: Sequence[Tensor], share: float) -> None:
        """Notes that letters have moved the weights, which is no step of the site's own.

        Args:
            by: how far, for each weight.
            share: what it was multiplied with.
        """
        if self._start:
            for start, d in zip(self._start, by, strict=True):
                start.add_(d, alpha=share)

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Context that puts the weights elsewhere, behind an exchange; momentum goes along."""
        before = self._copies() if self._last else []
        yield
        if self._last:
            for p, then, last in zip(self._weights, before, self._last, strict=True):
                last.add_(p - then)
        if self._start:
            self._start = self._copies()

    def state(self) -> StateDict:
        """Returns copies of the tensors."""
        return {"start": [t.clone() for t in self._start], "last": [t.clone() for t in self._last]}

    def load(self, state: StateDict) -> None:
        """Goes on from a saved state."""
        for kept, saved in ((self._start, state["start"]), (self._last, state["last"])):
            for t, s in zip(kept, saved, strict=True):
                t.copy_(s)

    @property
    def _weights(self) -> list[Tensor]:
        """The weights of now, which may lie elsewhere than before: `model.to` moves them."""
        return [p.detach() for p in self._params]

    def _copies(self) -> list[Tensor]:
        return [p.clone() for p in self._weights]
