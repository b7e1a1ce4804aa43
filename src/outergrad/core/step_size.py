"""Sizes of what a step sends of a whole model, from which a method sets its budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch


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
