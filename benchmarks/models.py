"""The models that the benchmarks train, each with a maker of synthetic batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and what it is trained on.

    Attributes:
        build: Makes the model.
        batch: Makes one site's inputs and labels, random from a generator.
        loss: Mean cross-entropy of the model's outputs and the labels.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy


def _relu_mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


def _labelled(shape: tuple[int, ...], classes: int) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        x = torch.randn(shape, generator=generator)
        return x, torch.randint(classes, shape[:1], generator=generator)

    return batch


class VisionTransformer(nn.Module):
    """A small ViT on 32 x 32 images, made of PyTorch's own encoder layers."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 3, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    *(width, heads, 4 * width),
                    dropout=0.0,
                    activation="gelu",
                    batch_first=True,
                    norm_first=True,
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, 3, 32, 32) to logits (batch, 10)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(images), -1, -1)
        hidden = self.blocks(torch.cat([first, tokens], dim=1) + self.positions)
        return self.head(self.norm(hidden[:, 0]))


class CausalAttention(nn.Module):
    """Self-attention that looks back only, with one projection for queries, keys, values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, positions, width) to the same shape."""
        q, k, v = self.project_in(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).unbind()
        mixed = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
        )
        return self.project_out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block with the norms before attention and before the MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, positions, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small character-level GPT whose head shares the embedding's weight."""

    def __init__(
        self, vocab: int = 65, positions: int = 128, width: int = 256, depth: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids (batch, positions) to logits (batch, vocab, positions)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.blocks(self.token(ids) + self.position(places))
        return self.head(self.norm(hidden)).transpose(1, 2)


def _text(sequences: int, positions: int, vocab: int) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(vocab, (sequences, positions + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    return batch


TASKS = {
    "mlp": Task(
        build=lambda: _relu_mlp(784, 1024, 1024, 10),
        batch=_labelled((32, 784), classes=10),
    ),
    "vgg": Task(
        build=lambda: _relu_mlp(25088, 4096, 4096, 1000),
        batch=_labelled((16, 25088), classes=1000),
    ),
    "vit": Task(build=VisionTransformer, batch=_labelled((16, 3, 32, 32), classes=10)),
    "gpt": Task(build=GPT, batch=_text(sequences=8, positions=128, vocab=65)),
}
