"""A part of a model that is to be computed again by all sites, as it was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from outergrad.core.blocks import Block, Replayer
from outergrad.core.coding import Codecs

if TYPE_CHECKING:
    from outergrad.replay.block_tap import TappedBlock


@dataclass(frozen=True)
class FoundBlock:
    """A block of a model.

    Attributes:
        block: its name and parameters.
        names: full names of its modules.
        modules_of: per module that can be called, what it consists of.
        params_of: per module that can be called, full names of its trained parameters.
        replayer: computes them.
        codecs: what numbers that are sent of it go through.
        explicit: whether the user named it: then it is an error if it may not be sent.
        raw_inputs: whether a module may be sent that reads nothing but what enters the model.
        swap: swaps the classes of its modules, or of what holds them.
    """

    block: Block
    names: tuple[str, ...]
    modules_of: Sequence[Sequence[nn.Module]]
    params_of: Sequence[Sequence[str]]
    replayer: Replayer
    codecs: Codecs
    explicit: bool
    raw_inputs: bool
    swap: Callable[[TappedBlock], None]
