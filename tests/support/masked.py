"""Of sums under masks: how near they are, and whether bytes look like random ones."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import torch

from outergrad.star.fixed_point import CARRIERS, HEADROOM
from outergrad.star.masks import Masks


def drawn(sites, *shape, dtype=torch.float32, scale=1.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(*shape, generator=draw, dtype=torch.float64) * scale).to(dtype)
        for _ in range(sites)
    ]


def most_error(parts, total, fell=1.0):
    """Error that docs/institutions.md states, with the rounding of the dtype."""
    sites, dtype = len(parts), total.dtype
    digits = CARRIERS[dtype].digits(sites)
    largest = fell * max(float(part.double().abs().max()) for part in parts)
    unit = 2.0 ** (math.frexp(largest)[1] + HEADROOM - digits)
    return sites * unit + torch.finfo(dtype).eps * total.double().abs()


def exactly(parts):
    """The sum, rounded once."""
    columns = zip(*(part.double().flatten().tolist() for part in parts), strict=True)
    total = torch.tensor([math.fsum(one) for one in columns], dtype=torch.float64)
    return total.view(parts[0].shape)


def chi_square(found):
    expected = len(found) / 256
    return float((((np.bincount(found, minlength=256) - expected) ** 2) / expected).sum())


UNUSUAL = 400.0
"""A chi-square of 255 degrees of freedom above this has a chance of 2e-8."""


def is_random(messages):
    return all(chi_square(one) < UNUSUAL for one in messages)


def masks_used(monkeypatch):
    """Nonces of each site's masks, without their units, as they are used from now on."""
    used, hide = defaultdict(list), Masks.hide

    def note(masks, numbers, nonce):
        used[masks].append(nonce[:2] + nonce[4:])  # with another unit, too
        hide(masks, numbers, nonce)

    monkeypatch.setattr(Masks, "hide", note)
    return used


def assert_never_twice(used, least):
    """Checks that more than `least` masks of each site were used, each once."""
    for nonces in used.values():
        assert len(nonces) > least
        assert len(set(nonces)) == len(nonces)
