"""What a site puts into a sum is its gradient times its share, to the bit, whatever the kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outergrad.buckets.dense import _SMALL, DenseBucket
from outergrad.comm.cost import RingCost

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [(3, 5), (_SMALL, 7), (2 * _SMALL,), (1,)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("share", [0.5, 1 / 3, 0.7])
def test_a_share_of_every_gradient_is_filled_in(dtype, sizes, share):
    generator = torch.Generator().manual_seed(0)
    params = {f"p{k}": nn.Parameter(torch.zeros(size, dtype=dtype)) for k, size in enumerate(sizes)}
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    bucket = DenseBucket(params)
    kept = bucket._buffer(RingCost(2))
    for now in (1.0, share):  # another share than before, as with `weight=`
        with torch.no_grad():
            bucket._fill(SimpleNamespace(adds_all_alike=lambda: True, share=now), kept)
        for name, p in params.items():
            assert torch.equal(kept.views[name], p.grad * now), name
