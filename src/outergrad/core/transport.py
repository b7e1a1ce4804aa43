"""The protocol between outergrad and a transport: collectives among the sites."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Enough = Callable[[Sequence[str | None]], bool]
"""Whether what sites have left is enough to go by; None of those that have left nothing yet."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Blocks until the result is there and returns it."""
        ...


class Comm(Protocol):
    """The few collectives that outergrad needs; every site calls them in the same order."""

    rank: int
    world_size: int
    sent_bytes: int
    received_bytes: int
    device: torch.device
    patience_s: float
    """How long a message may take."""

    @property
    def key(self) -> Hashable:
        """The same for all sessions of this process on one transport: they take turns on it.

        It is referred to weakly: an object, no number or tuple.
        """
        ...

    def all_reduce(self, t: Tensor) -> Work:
        """Sums t over the sites in place; `wait` returns it."""
        ...

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> Work:
        """Gathers 1-D tensors whose lengths may differ; `wait` returns one per site.

        Args:
            t: this site's, of length `sizes[rank]`.
            sizes: the agreed length on every site.
            lane: messages of one lane need not come in order with those of another.
        """
        ...

    def expect(self, sizes: Sequence[int], dtype: torch.dtype = torch.uint8, lane: int = 0) -> None:
        """Gets ready for the next `all_gather` or `all_to_all` of a lane that nobody expects yet.

        A transport that asks the other side before it sends need not ask then; it may do nothing.

        Args:
            sizes: as there.
            dtype: of what will come.
            lane: as there.
        """
        ...

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Work:
        """Sends every site a 1-D tensor of its own; `wait` returns what each had for this one.

        Args:
            parts: in the order of sites; what is for this one stays here.
            sizes: the agreed length of what each site has for this one.
        """
        ...

    def broadcast(self, t: Tensor) -> None:
        """Overwrites t with rank 0's."""
        ...

    def control(self, values: Sequence[int]) -> Tensor:
        """An int64 tensor for a collective that should not disturb the device."""
        ...

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int = 0
    ) -> list[str | None] | None:
        """Leaves a text for the other sites and closes the connections, for good.

        Returns what every site has left, or None if the place is gone where they leave it; see
        `LastWords` for the other arguments.
        """
        ...
