"""What a step sends of a whole model: what budgets are a part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Whole(NamedTuple):
    """What there is to send besides what a method compresses.

    Attributes:
        params: sizes of all trained parameters, bytes, by name.
        dtypes: theirs.
        control: bytes of a header and a vote, to each site.
    """

    params: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    control: int
