"""Words of the coverage table for the most that an audit read out of a layer's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from torch import nn

from outergrad.record.coverage import Coverage, Travel


class Word(Enum):
    """Most that an attack had back from one site's messages of one step, from strong to weak."""

    ROWS = "rows, at any size"
    FEW_ROWS = "rows of small batches"
    TOKENS = "tokens"
    MEMBERS = "who was there"
    NOISE = "who was there, less with less ε"
    UNFOUND = "nothing so far"
    UNTRIED = "not attacked"
    NOTHING = "nothing is sent"


class LayerKind(Enum):
    """Kind of layer, by what its gradient is a product of."""

    LINEAR = "rows"
    EMBEDDING = "ids"
    CONVOLUTION = "patches"
    OTHER = "others"


class Content(Enum):
    """Content of a layer's messages, whatever their bytes are."""

    ROWS = "rows as they are"
    GRADIENT = "the gradient, dense or in factors"
    PARTS = "its largest parts"
    ENTRIES = "some of its entries"
    NOISE = "any of these, with the noise of og.Private"
    OTHERWISE = "what no audit knows"


WORDS: Mapping[tuple[LayerKind, Content], Word] = {
    (LayerKind.LINEAR, Content.ROWS): Word.ROWS,
    (LayerKind.LINEAR, Content.GRADIENT): Word.FEW_ROWS,
    (LayerKind.LINEAR, Content.PARTS): Word.FEW_ROWS,
    (LayerKind.LINEAR, Content.ENTRIES): Word.MEMBERS,
    (LayerKind.LINEAR, Content.NOISE): Word.NOISE,
    (LayerKind.EMBEDDING, Content.GRADIENT): Word.TOKENS,
    (LayerKind.EMBEDDING, Content.PARTS): Word.TOKENS,
    (LayerKind.EMBEDDING, Content.ENTRIES): Word.TOKENS,
    (LayerKind.EMBEDDING, Content.NOISE): Word.NOISE,
    (LayerKind.CONVOLUTION, Content.GRADIENT): Word.MEMBERS,
    (LayerKind.CONVOLUTION, Content.PARTS): Word.UNFOUND,
    (LayerKind.CONVOLUTION, Content.ENTRIES): Word.UNFOUND,
}
"""Words by kind of layer and content of its messages, as measured by ``outergrad reproduce audit
--full``; of what is not here no attack has been tried."""

_GRADIENTS = (
    *("this site's gradient", "this site's change"),
    *("the mean gradient", "the mean change"),
)
_TYPES: Sequence[tuple[tuple[type[nn.Module], ...], LayerKind]] = (
    ((nn.Linear, nn.MultiheadAttention), LayerKind.LINEAR),
    ((nn.Embedding, nn.EmbeddingBag), LayerKind.EMBEDDING),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), LayerKind.CONVOLUTION),
)


class Layer(NamedTuple):
    """Layer that a parameter belongs to.

    Attributes:
        kind: Kind of the layer.
        weight: Full name of its weight, with whose gradient an attack begins.
    """

    kind: LayerKind
    weight: str


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Returns the layer of each parameter, by full name.

    A table that is tied to a head counts as linear: its gradient does not tell the ids.
    """
    found: dict[str, Layer] = {}
    linear: set[int] = set()
    names = {id(p): name for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        kind = next((kind for types, kind in _TYPES if isinstance(module, types)), LayerKind.OTHER)
        own = dict(module.named_parameters(prefix, recurse=False))
        weight = next((name for name, p in own.items() if p.dim() > 1), "")
        for p in own.values():
            if kind == LayerKind.LINEAR:
                linear.add(id(p))
            found.setdefault(names[id(p)], Layer(kind, weight))
    tied = {names[p] for p in linear}
    return {
        n: one._replace(kind=LayerKind.LINEAR) if n in tied else one for n, one in found.items()
    }


def read_noted(
    lines: Coverage, layers: Mapping[str, Layer], *, changed: bool, noisy: bool
) -> Coverage:
    """Returns a coverage table with what the audit had back of each parameter's layer.

    A word is about what enters the layer, as one observer of one site's own messages reads it: of
    the first layer that is the data. A bias has the word of its weight.

    Args:
        lines: The table.
        layers: Layers by parameter.
        changed: Whether a transform changes gradients before they travel.
        noisy: Whether it adds the noise of `og.Private`.
    """
    by_name = {line.parameter: line for line in lines}

    def word(line: Travel) -> Word:
        if content_of(line) is None:
            return Word.NOTHING
        layer = layers.get(line.parameter, Layer(LayerKind.OTHER, ""))
        content = content_of(by_name.get(layer.weight, line))
        if changed and content is not None:
            content = Content.NOISE if noisy else Content.OTHERWISE
        return Word.UNTRIED if content is None else WORDS.get((layer.kind, content), Word.UNTRIED)

    return Coverage(tuple(replace(line, read=word(line).value) for line in lines))


def content_of(line: Travel) -> Content | None:
    """Returns what the messages of a parameter say; None if there are none."""
    if line.reveals == "nothing":
        return None
    if line.reveals.endswith("of each row"):
        return Content.ROWS
    if not line.reveals.startswith(_GRADIENTS):
        return Content.OTHERWISE
    return {"low rank": Content.PARTS, "sparse": Content.ENTRIES}.get(
        line.travels, Content.GRADIENT
    )
