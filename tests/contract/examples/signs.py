"""A method of another payload: the sign of each entry in one bit, and one scale per weight."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from outergrad.core.coding import Field
from outergrad.core.payload import Form
from outergrad.methods.formed import FormedCompressor


@dataclass(frozen=True)
class SignForm(Form):
    """How a payload stands in a message, and what is read of it."""

    def fields(self, slot, count, dtype, bias, codecs):
        """Lengths are agreed before there is a payload: they follow from count alone."""
        return [Field((-(-count // 8),), torch.uint8), Field((1,), torch.float32)]

    def read(self, tensors, slot, count):
        """The gradient that arrives."""
        bits, scale = tensors
        flags = (bits[:, None] >> torch.arange(8, device=bits.device)) & 1
        signs = 2.0 * flags.flatten()[:count] - 1
        return (scale * signs).view(slot.groups, slot.outputs, slot.inputs)


class SignCompressor(FormedCompressor):
    """What each site does in each step; error feedback is the base class's."""

    form = SignForm()

    def encode(self, slot, due_GOI, count):
        """The payload of a gradient, with what was not sent before: a tensor per field."""
        flags = pad(due_GOI.flatten() >= 0, (0, -count % 8)).view(-1, 8)
        bits = (flags << torch.arange(8, device=flags.device)).sum(1)
        return [bits.to(torch.uint8), due_GOI.abs().mean().float()[None]]

    def reveals(self, unit):
        """What the coverage table says."""
        return "the signs of this site's gradient"


@dataclass(frozen=True)
class Signs:
    """What the user passes to `og.distribute`."""

    every: int = 1

    def compressor(self):
        """A new one, with a memory of its own."""
        return SignCompressor()
