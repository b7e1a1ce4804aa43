"""The protocol of what collectives cost a site: bytes, and how many delays."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from outergrad.core.types import Route


class Traffic(NamedTuple):
    """Payload of one collective on one site, bytes.

    Attributes:
        sent: by this site.
        received: by this site.
    """

    sent: int
    received: int


class CostModel(Protocol):
    """What collectives cost on a transport, the same on every site, by which methods choose.

    All of it is proportional to the payload, so that the bytes of a message are the sums of those
    of its parts.
    """

    @property
    def sites(self) -> int:
        """S."""
        ...

    @property
    def copies(self) -> int:
        """How many times a site sends what goes to all other sites."""
        ...

    def all_reduce(self, nbytes: int) -> Traffic:
        """Of a tensor that is summed over the sites."""
        ...

    def all_gather(self, own: int, others: int) -> Traffic:
        """Of what each site sends to all.

        Args:
            own: bytes that this site has.
            others: bytes that all other sites have together.
        """
        ...

    def all_to_all(self, own: int, others: int) -> Traffic:
        """Of what each site sends to each.

        Args:
            own: bytes that this site has for all other sites together.
            others: bytes that all other sites have for this one.
        """
        ...

    def share(self, nbytes: float, way: Route) -> float:
        """Bytes that, gathered from every site, keep a link as busy as so many that go this way.

        So that ways compare: factors are gathered, dense gradients all-reduced. What S - 1 other
        sites send takes (S - 1) times as long.
        """
        ...

    def delays(self, way: Route) -> int:
        """How many times a message of low rank waits for as long as an all-gather of few bytes."""
        ...
