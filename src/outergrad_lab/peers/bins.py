"""Numbers in few bits: bins of equal width around their mean, decoded as the means of the bins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outergrad_lab.peers.packing import packed_bits, unpacked_bits

SIGMAS = 6
"""Width of all bins together, in standard deviations; the outer ones take what is beyond."""


class Binned(NamedTuple):
    """Numbers by their bins.

    Attributes:
        levels_B: Mean of each bin, float32; 0 where it is empty.
        codes_N: Bin of each number, int64.
    """

    levels_B: Tensor
    codes_N: Tensor

    def part(self, start: int, count: int) -> Binned:
        """Returns some of the numbers, in the same bins."""
        return self._replace(codes_N=self.codes_N[start : start + count])

    def values(self, dtype: torch.dtype) -> Tensor:
        """Decodes the numbers: (N,)."""
        return self.levels_B.to(dtype)[self.codes_N]


def binned(values: Tensor, bits: int) -> Binned:
    """Sorts numbers into 2^bits bins: four of 1.5 standard deviations each, in two bits."""
    x_N, bins = values.reshape(-1), 2**bits
    sigma = x_N.std(unbiased=False) if len(x_N) else x_N.new_zeros(())
    width = (SIGMAS * sigma / bins).clamp_min(torch.finfo(x_N.dtype).tiny)
    place_N = ((x_N - x_N.mean()) / width + bins / 2).floor().clamp(0, bins - 1)
    codes_N = place_N.nan_to_num(0).long()  # NaN stays NaN, as the mean of the first bin
    sums_B = x_N.new_zeros(bins).index_add_(0, codes_N, x_N)
    count_B = codes_N.bincount(minlength=bins).clamp_min(1)
    return Binned((sums_B / count_B).float(), codes_N)


def nbytes(count: int, bits: int) -> int:
    """Returns the bytes of numbers: a float32 per bin, and `bits` per number."""
    return _level_bytes(bits) + -(-count * bits // 8)


def written(own: Binned, bits: int) -> Tensor:
    """Encodes numbers as bytes, uint8."""
    return torch.cat([own.levels_B.view(torch.uint8), packed_bits(own.codes_N, bits)])


def read(content: Tensor, bits: int, count: int) -> Binned:
    """Inverts `written`."""
    levels, codes = content.tensor_split([_level_bytes(bits)])
    return Binned(levels.clone().view(torch.float32), unpacked_bits(codes, bits, count))


def _level_bytes(bits: int) -> int:
    return torch.float32.itemsize * 2**bits
