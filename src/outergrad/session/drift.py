"""Comparison of replicas: parameters and buffers should be equal to the bit on all sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outergrad.core.errors import ExchangeError
from outergrad.messages.checksum import checksum, combined
from outergrad.messages.raw import resolved

OnDrift = Literal["raise", "warn", "mend"]
ON_DRIFT: tuple[OnDrift, ...] = ("raise", "warn", "mend")
LANE = 3
"""Lane of the transport, apart from the messages of steps, as votes are."""
WordsOfAll = Callable[[Sequence[int]], list[list[int]]]
"""Gathers a few integers from every site, in their order."""


Said = Callable[[Sequence[int]], str]
"""Formats sites, or ranks of a mesh, as words."""


@dataclass(frozen=True)
class Drift:
    """Difference between replicas.

    Attributes:
        sites: ranks of the sites whose replica is not that of the first one.
        names: names of the parameters and buffers that differ between some sites.
        compared: number of parameters and buffers that were compared.
        first: the site that the first of `sites` was compared with.
        said: formats sites, or ranks of a mesh, as words.
    """

    sites: tuple[int, ...]
    names: tuple[str, ...]
    compared: int
    first: int
    said: Said

    def told(self, step: int, remedy: str) -> str:
        """Describes the difference, in words that are the same on every site."""
        who = f"{self.said(self.sites)} ha{'ve' if len(self.sites) > 1 else 's'}"
        than = self.said([self.first])
        return (
            f"the replicas differ after step {step}: {who} another {self.names[0]!r} than {than}; "
            f"{len(self.names)} of {self.compared} parameters and buffers differ; {remedy}"
        )


def compared(
    words_of_all: WordsOfAll,
    tensors: Mapping[str, Tensor | None],
    groups: Sequence[Sequence[int]],
    said: Said,
) -> Drift | None:
    """Compares tensors over the sites, bit by bit; None if they are equal everywhere.

    Every site sends 8 bytes to every other; where these differ, 8 more for each tensor.

    Args:
        words_of_all: gathers integers from all sites.
        tensors: by name, in an order that is the same on all sites; None for one that is missing.
        groups: sites whose tensors should be equal among themselves.
        said: as in `Drift`.

    Raises:
        ExchangeError: what a site sent contradicts itself.
    """
    sums = checksums(list(tensors.values()))
    whole = words_of_all([combined(sums)])
    if all(whole[site] == whole[group[0]] for group in groups for site in group):
        return None
    sums_S = words_of_all(sums)
    liar = next((r for r, own in enumerate(sums_S) if [combined(own)] != whole[r]), None)
    if liar is not None:
        raise ExchangeError(f"the checksums of {said([liar])} contradict each other")
    firsts = {site: group[0] for group in groups for site in group}
    sites = tuple(site for site in sorted(firsts) if sums_S[site] != sums_S[firsts[site]])
    pairs = [(sums_S[site], sums_S[firsts[site]]) for site in sites]
    names = tuple(
        name for k, name in enumerate(tensors) if any(own[k] != first[k] for own, first in pairs)
    )
    return Drift(sites, names, len(sums), firsts[sites[0]], said)


@torch.no_grad()
def checksums(tensors: Sequence[Tensor | None]) -> list[int]:
    """Returns the checksum of each tensor, 0 for None or an empty one; synchronises just once."""
    found = [checksum(resolved(t).contiguous()) for t in tensors if t is not None and t.numel()]
    each = iter(torch.stack(found).tolist() if found else [])
    return [next(each) if t is not None and t.numel() else 0 for t in tensors]
