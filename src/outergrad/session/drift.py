"""Comparison of replicas: parameters and buffers should be equal to the bit on all sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outergrad.comm.words import words_of_all
from outergrad.core.errors import ExchangeError
from outergrad.core.transport import Comm
from outergrad.messages.checksum import checksum, combined
from outergrad.messages.raw import resolved

OnDrift = Literal["raise", "warn", "mend"]
ON_DRIFT: tuple[OnDrift, ...] = ("raise", "warn", "mend")
_LANE = 3
"""Lane of the transport, apart from the messages of steps, as votes are."""


@dataclass(frozen=True)
class Drift:
    """Difference between replicas.

    Attributes:
        sites: ranks of the sites whose replica is not that of site 0.
        names: names of the parameters and buffers that differ between some sites.
        compared: number of parameters and buffers that were compared.
    """

    sites: tuple[int, ...]
    names: tuple[str, ...]
    compared: int

    def told(self, step: int, remedy: str) -> str:
        """Describes the difference, in words that are the same on every site."""
        several = len(self.sites) > 1
        who = f"site{'s' * several} {', '.join(map(str, self.sites))} ha{'ve' if several else 's'}"
        return (
            f"the replicas differ after step {step}: {who} another {self.names[0]!r} than site 0; "
            f"{len(self.names)} of {self.compared} parameters and buffers differ; {remedy}"
        )


def compared(comm: Comm, tensors: Mapping[str, Tensor | None]) -> Drift | None:
    """Compares tensors over the sites, bit by bit; None if they are equal everywhere.

    Every site sends 8 bytes to every other; where these differ, 8 more for each tensor.

    Args:
        comm: the transport.
        tensors: by name, in an order that is the same on all sites; None for one that is missing.

    Raises:
        ExchangeError: what a site sent contradicts itself.
    """
    sums = checksums(list(tensors.values()))
    whole = words_of_all(comm, [combined(sums)], _LANE)
    if all(word == whole[0] for word in whole):
        return None
    sums_S = words_of_all(comm, sums, _LANE)
    liar = next((r for r, own in enumerate(sums_S) if [combined(own)] != whole[r]), None)
    if liar is not None:
        raise ExchangeError(f"the checksums of site {liar} contradict each other")
    columns = zip(tensors, *sums_S, strict=True)
    names = tuple(name for name, *column in columns if len({*column}) > 1)
    sites = tuple(rank for rank, own in enumerate(sums_S) if own != sums_S[0])
    return Drift(sites, names, len(sums))


@torch.no_grad()
def checksums(tensors: Sequence[Tensor | None]) -> list[int]:
    """Returns the checksum of each tensor, 0 for None or an empty one; synchronises just once."""
    found = [checksum(resolved(t).contiguous()) for t in tensors if t is not None and t.numel()]
    each = iter(torch.stack(found).tolist() if found else [])
    return [next(each) if t is not None and t.numel() else 0 for t in tensors]
