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


class Kind(Enum):
    """Kind of layer, by what its gradient is a product of."""

    LINEAR = "rows"
    EMBEDDING = "ids"
    CONVOLUTION = "patches"
    OTHER = "others"


class Way(Enum):
    """Content of a layer's messages, whatever their bytes are."""

    ROWS = "rows as they are"
    GRADIENT = "the gradient, dense or in factors"
    PARTS = "its largest parts"
    ENTRIES = "some of its entries"
    NOISE = "any of these, with the noise of og.Private"
    OTHERWISE = "what no audit knows"


WORDS: Mapping[tuple[Kind, Way], Word] = {
    (Kind.LINEAR, Way.ROWS): Word.ROWS,
    (Kind.LINEAR, Way.GRADIENT): Word.FEW_ROWS,
    (Kind.LINEAR, Way.PARTS): Word.FEW_ROWS,
    (Kind.LINEAR, Way.ENTRIES): Word.MEMBERS,
    (Kind.LINEAR, Way.NOISE): Word.NOISE,
    (Kind.EMBEDDING, Way.GRADIENT): Word.TOKENS,
    (Kind.EMBEDDING, Way.PARTS): Word.TOKENS,
    (Kind.EMBEDDING, Way.ENTRIES): Word.TOKENS,
    (Kind.EMBEDDING, Way.NOISE): Word.NOISE,
    (Kind.CONVOLUTION, Way.GRADIENT): Word.MEMBERS,
    (Kind.CONVOLUTION, Way.PARTS): Word.UNFOUND,
    (Kind.CONVOLUTION, Way.ENTRIES): Word.UNFOUND,
}
"""Words by kind of layer and way of travel, as measured by ``outergrad reproduce audit --full``; of
what is not here no attack has been tried."""

_GRADIENTS = (
    *("this site's gradient", "this site's change"),
    *("the mean gradient", "the mean change"),
)
_TYPES: Sequence[tuple[tuple[type[nn.Module], ...], Kind]] = (
    ((nn.Linear, nn.MultiheadAttention), Kind.LINEAR),
    ((nn.Embedding, nn.EmbeddingBag), Kind.EMBEDDING),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), Kind.CONVOLUTION),
)


class Layer(NamedTuple):
    """Layer that a parameter belongs to.

    Attributes:
        kind: Kind of the layer.
        weight: Full name of its weight, with whose gradient an attack begins.
    """

    kind: Kind
    weight: str


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Returns the layer of each parameter, by full name.

    A table that is tied to a head counts as linear: its gradient does not tell the ids.
    """
    found: dict[str, Layer] = {}
    linear: set[int] = set()
    names = {id(p): name for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        kind = next((kind for types, kind in _TYPES if isinstance(module, types)), Kind.OTHER)
        own = dict(module.named_parameters(prefix, recurse=False))
        weight = next((name for name, p in own.items() if p.dim() > 1), "")
        for p in own.values():
            if kind == Kind.LINEAR:
                linear.add(id(p))
            found.setdefault(names[id(p)], Layer(kind, weight))
    tied = {names[p] for p in linear}
    return {n: one._replace(kind=Kind.LINEAR) if n in tied else one for n, one in found.items()}


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
        if way_of(line) is None:
            return Word.NOTHING
        layer = layers.get(line.parameter, Layer(Kind.OTHER, ""))
        way = way_of(by_name.get(layer.weight, line))
        if changed and way is not None:
            way = Way.NOISE if noisy else Way.OTHERWISE
        return Word.UNTRIED if way is None else WORDS.get((layer.kind, way), Word.UNTRIED)

    return Coverage(tuple(replace(line, read=word(line).value) for line in lines))


def way_of(line: Travel) -> Way | None:
    """Returns what the messages of a parameter say; None if there are none."""
    if line.reveals == "nothing":
        return None
    if line.reveals.endswith("of each row"):
        return Way.ROWS
    if not line.reveals.startswith(_GRADIENTS):
        return Way.OTHERWISE
    return {"low rank": Way.PARTS, "sparse": Way.ENTRIES}.get(line.travels, Way.GRADIENT)
