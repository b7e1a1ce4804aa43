"""Means over the sites in few bits: each site adds up a piece of all, and bins it again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from outergrad_lab.peers.bins import Binned, binned, nbytes, read, written
from outergrad_lab.peers.peer import Sites


class BinnedMeans:
    """Means of tensors in two rounds, of about as many bytes as a ring of so few bits.

    In the first one each site sends every other one its piece of all tensors. In the second one it
    sends all others the mean of its own piece, in bins around that mean.

    Args:
        sites: The sites.
        bits: Bits of a number.
        tensors: Tensors of their shapes and dtypes.
    """

    def __init__(self, sites: Sites, bits: int, tensors: Sequence[Tensor]) -> None:
        self._sites, self._bits = sites, bits
        self._tensors = [(x.shape, x.dtype) for x in tensors]
        self._counts = [pieces(x.numel(), sites.number) for x in tensors]

    def mean(self, own: Sequence[Binned]) -> list[Tensor]:
        """Returns the mean of every tensor, to the bit the same at all sites."""
        if not own:
            return []
        found = self._sites.exchange([self._piece(own, to) for to in range(self._sites.number)])
        by_site = [self._values(content, self._sites.rank) for content in found]
        means = [torch.stack(sent).mean(0) for sent in zip(*by_site, strict=True)]
        return self._joined(self._spread(means))

    def _spread(self, means: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns the means of all pieces, by site and tensor; messages have equal lengths."""
        own = torch.cat([written(binned(mean, self._bits), self._bits) for mean in means])
        longest = sum(self._sizes(0))
        found = self._sites.gather(pad(own, (0, longest - len(own))))
        return [self._values(content, site) for site, content in enumerate(found)]

    def _joined(self, by_site: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        flat = (torch.cat(parts) for parts in zip(*by_site, strict=True))
        return [x.view(shape) for x, (shape, _) in zip(flat, self._tensors, strict=True)]

    def _piece(self, own: Sequence[Binned], site: int) -> Tensor:
        """Encodes the piece of all tensors that a site adds up."""
        cut = zip(own, self._counts, strict=True)
        parts = [x.part(sum(counts[:site]), counts[site]) for x, counts in cut]
        return torch.cat([written(part, self._bits) for part in parts])

    def _values(self, content: Tensor, site: int) -> list[Tensor]:
        """Decodes what is there of all pieces that a site adds up."""
        sizes = self._sizes(site)
        parts = content[: sum(sizes)].split(sizes)
        each = zip(parts, self._counts, self._tensors, strict=True)
        return [read(x, self._bits, counts[site]).values(dtype) for x, counts, (_, dtype) in each]

    def _sizes(self, site: int) -> list[int]:
        """Returns the bytes of a site's piece of every tensor."""
        return [nbytes(counts[site], self._bits) for counts in self._counts]


def pieces(count: int, number: int) -> list[int]:
    """Divides a count as evenly as whole numbers allow, larger parts first."""
    return [count // number + (at < count % number) for at in range(number)]
