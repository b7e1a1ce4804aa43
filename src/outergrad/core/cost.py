"""The protocol of a transport's cost model: bytes and delays of collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from outergrad.core.types import Route


class Traffic(NamedTuple):
    """Payload of one collective on one site, in bytes.

    Attributes:
        sent: by this site.
        received: by this site.
    """

    sent: int
    received: int


class CostModel(Protocol):
    """Cost of collectives on a transport, equal on every site; methods decide by it.

    Every cost is proportional to the payload, so the bytes of a message are the sum of the bytes
    of its parts.
    """

    @property
    def sites(self) -> int:
        """Number of sites, S."""
        ...

    @property
    def copies(self) -> int:
        """Number of times that a site sends a payload meant for all other sites."""
        ...

    def all_reduce(self, nbytes: int) -> Traffic:
        """Traffic of the all-reduce of a tensor of `nbytes`."""
        ...

    def all_gather(self, own: int, others: int) -> Traffic:
        """Traffic of an all-gather.

        Args:
            own: bytes of this site's tensor.
            others: bytes of the tensors of all other sites together.
        """
        ...

    def all_to_all(self, own: int, others: int) -> Traffic:
        """Traffic of an all-to-all.

        Args:
            own: bytes that this site has for all other sites together.
            others: bytes that all other sites have for this one.
        """
        ...

    def share(self, nbytes: float, way: Route) -> float:
        """Converts bytes on a route to the gathered bytes that keep a link busy for as long.

        Makes routes comparable: factors are gathered, dense gradients all-reduced. The result is
        per sending site: S - 1 other sites keep the link busy (S - 1) times as long.
        """
        ...

    def delays(self, way: Route) -> int:
        """Delays of a low-rank message on a route, counted in delays of a short all-gather."""
        ...


class Whole(NamedTuple):
    """Sizes of a model's parameters and of the fixed messages of a step.

    Attributes:
        params: size of each trained parameter in bytes, by name.
        dtypes: dtype of each trained parameter, by name.
        control: bytes of a header and a vote, to each site.
    """

    params: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    control: int
