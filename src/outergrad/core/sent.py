"""Messages of a site as their receivers decode them, for a tap on its transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from outergrad.core.payload import Arrived
from outergrad.core.types import Slot


class Way(Enum):
    """Receivers of a message."""

    GATHERED = "gathered"
    """Every other site has it as it was sent."""
    SUMMED = "summed"
    """It is a term of a sum over the sites: whoever adds up sees it, others the sum."""
    OWNED = "owned"
    """One other site, its owner, has it as it was sent; all have what that site merges."""


@dataclass(frozen=True)
class Sent:
    """A gradient in a message that leaves this site.

    Attributes:
        name: Full name of the parameter, or of the block.
        content: Gradient in the parameter's shape, or a payload as read from the message: factors,
            a matrix (G, O, I), entries, or all tensors of a block's uses.
        way: Who receives it.
        scale: Factor that makes of it this site's gradient, or change of the weights.
        slot: Slot of a payload; None for a whole parameter and for a block.
    """

    name: str
    content: Arrived | Sequence[Tensor]
    way: Way
    scale: float = 1.0
    slot: Slot | None = None


class MessageTap(Protocol):
    """Listener on a transport, told of everything that is sent of gradients: `Comm.tap`.

    Contents are views of messages, which the next step overwrites: copy what is to be kept.
    """

    def sent(self, sent: Sent) -> None:
        """Takes a gradient that leaves this site."""
        ...
