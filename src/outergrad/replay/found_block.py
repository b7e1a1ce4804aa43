"""Description of a block that was found in a model."""

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
    """A block of a model, before a session taps it.

    Attributes:
        block: its name and parameters.
        names: full names of its modules.
        modules_of: for each callable module, the modules it consists of.
        params_of: for each callable module, the full names of its trained parameters.
        replayer: computes and replays the modules.
        codecs: encode the floating tensors that are sent.
        explicit: True if the user named the block; it is then an error if it may not be sent.
        raw_inputs: True if a module may be sent that reads only the model's own input.
        swap: swaps the classes of its modules, or of their host.
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
