"""A GPT of any size, made of GPT-2's layers.

It repeats that of `outergrad_lab.models` on purpose, as the machine with the GPU may lack the extra
`cli` that the lab needs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BPW: Tensor) -> Tensor:
        """Maps (batch, positions, width) to the same shape."""
        x_BPW = x_BPW + self._attend(self.norm1(x_BPW))
        return x_BPW + self.mlp(self.norm2(x_BPW))

    def _attend(self, x_BPW: Tensor) -> Tensor:
        parts = self.project_in(x_BPW).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A decoder whose head shares the weight of the token embedding."""

    def __init__(self, *, vocab: int, positions: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.token.weight
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids_BP: Tensor) -> Tensor:
        """Maps token ids (batch, positions) to logits (batch, positions, vocab)."""
        places_P = torch.arange(ids_BP.shape[1], device=ids_BP.device)
        return self.head(self.norm(self.blocks(self.token(ids_BP) + self.position(places_P))))
