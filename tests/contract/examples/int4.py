"""A codec of one's own: numbers in four bits each, two to a byte, and a step per row."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from outergrad.wire import Plain

STEPS = 7  # on either side of zero


@dataclass(frozen=True)
class Int4:
    rounds_to = None  # a dtype, if to round each number to it is all that is done
    picks = False  # whether values are left out; if not, all are written in another dtype

    def tensors(self, shape, dtype):
        *rows, width = shape
        return [Plain((*rows, (width + 1) // 2), torch.uint8), Plain((*rows, 1), torch.float32)]

    def encode(self, rows):
        largest = rows.abs().amax(dim=-1, keepdim=True).float()
        smallest = torch.finfo(torch.float32).tiny  # a row of zeros has a step, too
        step = (largest / STEPS).clamp_min(smallest)  # infinity or NaN is seen in it
        multiples = (rows / step).round().nan_to_num(0.0) + STEPS + 1
        pairs = pad(multiples.to(torch.uint8), (0, rows.shape[-1] % 2)).unflatten(-1, (-1, 2))
        return [pairs[..., 0] << 4 | pairs[..., 1], step]

    def decode(self, written, shape):
        pairs, step = written
        multiples = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(-2) - float(STEPS + 1)
        return multiples[..., : shape[-1]] * step
