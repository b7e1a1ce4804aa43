"""A small vision transformer, a small text encoder and a small GPT."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.launch.errors import RecipeError
from outergrad_lab.data.dataset import Format
from outergrad_lab.data.texts import PADDING
from outergrad_lab.models.small import Activation

PATCH = 4


class VisionTransformer(nn.Module):
    """A small ViT, made of PyTorch's own encoder layers."""

    def __init__(
        self,
        format: Format,
        activation: Activation = nn.GELU,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
    ) -> None:
        super().__init__()
        layers = (_encoder_layer(width, heads, activation) for _ in range(depth))
        channels, height, columns = format.shape
        patches = (height // PATCH) * (columns // PATCH)
        self.patches = nn.Conv2d(channels, width, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, format.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (rows, channels, height, width) to logits (rows, classes)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(images), -1, -1)
        hidden = self.blocks(torch.cat([first, tokens], dim=1) + self.positions)
        return self.head(self.norm(hidden[:, 0]))


class TextEncoder(nn.Module):
    """A small encoder that classifies texts by the mean over their tokens."""

    def __init__(
        self, format: Format, activation: Activation, width: int, depth: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        assert format.vocabulary is not None
        (positions,) = format.shape
        self.token = nn.Embedding(format.vocabulary, width)
        self.position = nn.Embedding(positions, width)
        layers = (_encoder_layer(width, heads, activation) for _ in range(depth))
        self.blocks = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, format.classes)
        for embedding in (self.token, self.position):  # alike, or one drowns the other
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids (rows, positions) to logits (rows, classes)."""
        padding = ids == PADDING
        padding[:, 0] = False  # the mean needs a token, also of an empty text
        hidden = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=padding)
        return self.head(_mean(self.norm(hidden), ~padding))


class TextBag(nn.Module):
    """A linear classifier of the mean embedding of a text, as fastText is.

    Source: Joulin et al., arXiv 1607.01759.
    """

    def __init__(self, format: Format, width: int) -> None:
        super().__init__()
        assert format.vocabulary is not None
        self.token = nn.Embedding(format.vocabulary, width)
        self.head = nn.Linear(width, format.classes)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids (rows, positions) to logits (rows, classes)."""
        counted = ids != PADDING
        counted[:, 0] = True  # the mean needs a token, also of an empty text
        return self.head(_mean(self.token(ids), counted))


def _mean(hidden: Tensor, counted: Tensor) -> Tensor:
    """Returns the mean over counted positions, (rows, positions, width) to (rows, width)."""
    weights = counted.to(hidden.dtype)
    return torch.einsum("npw,np->nw", hidden, weights / weights.sum(dim=1, keepdim=True))


def _encoder_layer(width: int, heads: int, activation: Activation) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        *(width, heads, 4 * width),
        dropout=0.0,
        activation=activation(),
        batch_first=True,
        norm_first=True,
    )


class CausalAttention(nn.Module):
    """Self-attention that looks back only, with one projection for queries, keys, values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (rows, positions, width) to the same shape."""
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
        """Maps (rows, positions, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT whose head shares the embedding's weight."""

    def __init__(self, format: Format, width: int = 256, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        (positions,) = format.shape
        self.token = nn.Embedding(format.classes, width)
        self.position = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, format.classes, bias=False)
        for embedding in (self.token, self.position):  # alike, or one drowns the other
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids (rows, positions) to logits (rows, classes, positions)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.blocks(self.token(ids) + self.position(places))
        return self.head(self.norm(hidden)).transpose(1, 2)


def build_vit(format: Format, _widths: Sequence[int], activation: Activation) -> VisionTransformer:
    """Builds a ViT of six layers and 192 features for square patches of the images.

    Raises:
        RecipeError: The patches would not cover the images.
    """
    if any(side % PATCH for side in format.shape[1:]):
        raise RecipeError(f"--model vit needs images with sides of n x {PATCH}, not {format}")
    return VisionTransformer(format, activation)


def build_gpt(format: Format, widths: Sequence[int], _activation: Activation) -> GPT:
    """Builds a GPT of four layers and four heads of a quarter of the width each.

    Raises:
        RecipeError: The width is not that of four heads.
    """
    return GPT(format, _of_four_heads("gpt", widths))


def build_bag(format: Format, widths: Sequence[int], _activation: Activation) -> TextBag:
    """Builds a linear classifier of mean embeddings with ``widths[0]`` features."""
    return TextBag(format, *widths)


def build_encoder(format: Format, widths: Sequence[int], activation: Activation) -> TextEncoder:
    """Builds an encoder of two layers and four heads of a quarter of the width each.

    Raises:
        RecipeError: The width is not that of four heads.
    """
    return TextEncoder(format, activation, _of_four_heads("encoder", widths))


def _of_four_heads(model: str, widths: Sequence[int]) -> int:
    (width,) = widths
    if width % 4:
        raise RecipeError(f"--widths {width} does not fit --model {model}: give a multiple of 4")
    return width
