"""Texts of a batch, from the spans of what entered two attention layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outergrad.tools.audit.attacks.span import NEAR, Span, span_of
from outergrad.tools.audit.attacks.tokens import looked_up

_MOST_PREFIXES = 256
"""Prefixes kept at a position: more of them mean that the span tells too little."""
_SWEEPS = 6
_RESTARTS = 4
"""Starts for each row of the batch, where positions look both ways."""
_LIKELY = 0.2
"""Share of a token in a position's gradient from which on it probably stood there."""
_MOST_TOKENS = 256
"""Tokens that may stand at a position, for the same reason."""


@dataclass(frozen=True)
class TextLayers:
    """Two layers of a text model from which texts can be read.

    Attributes:
        first: Weight that each position reaches by its own token alone.
        second: Weight of the same shape that other positions reach, too.
        causal: True if these are earlier positions only.
    """

    first: str
    second: str
    causal: bool


class _AllThereError(Exception):
    """Raised to end a forward."""


@torch.enable_grad()  # without gradients PyTorch's encoder layers would run as one kernel
def inputs_of(model: nn.Module, ids_BP: Tensor, weights: Sequence[str]) -> dict[str, Tensor]:
    """Returns what enters the layers of some weights, each (texts, positions, width).

    The forward ends once all are there.
    """
    found: dict[str, Tensor] = {}
    handles = []
    for weight in weights:

        def note(_: nn.Module, args: tuple[Tensor, ...], weight: str = weight) -> None:
            if args and isinstance(args[0], Tensor):
                found.setdefault(weight, args[0].detach())
            if len(found) == len(weights):
                raise _AllThereError

        layer = model.get_submodule(weight.rpartition(".")[0])
        handles.append(layer.register_forward_pre_hook(note))
    try:
        model(ids_BP)
    except _AllThereError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found


def text_layers(model: nn.Module, vocabulary: int, positions: int) -> TextLayers | None:
    """Finds the two layers, by a text of which one token is changed; None if there are none.

    Args:
        model: Maps ids (texts, positions).
        vocabulary: Number of tokens.
        positions: Of a text; 3 and more.
    """
    places = torch.arange(positions)
    middle, before_P = positions // 2, (places * 7 + 1) % vocabulary
    after_P = before_P.clone()
    after_P[middle] = (after_P[middle] + 1) % vocabulary
    weights = [name for name, p in model.named_parameters() if p.ndim == 2]
    inputs = inputs_of(model, torch.stack([before_P, after_P]), weights)
    matching = {w: t for w, t in inputs.items() if t.ndim == 3 and t.shape[:2] == (2, positions)}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    first: str | None = None
    for weight, t_2PI in matching.items():  # in the order of the forward
        changed_P = (t_2PI[0] != t_2PI[1]).any(dim=1)
        alone = int(changed_P.sum()) == 1 and bool(changed_P[middle])
        if first is None and alone:
            first = weight
        elif first is not None and not alone and shapes[weight] == shapes[first]:
            return TextLayers(first, weight, causal=not bool(changed_P[:middle].any()))
    return None


def read_texts(
    model: nn.Module,
    gradients: Mapping[str, Tensor],
    *,
    vocabulary: int,
    positions: int,
    texts: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns texts of a batch that the gradients of two attention layers bear out.

    At the first layer a token at a position is one known vector, so that each is tested against
    the span of the layer's rows. At the second layer a vector depends on the other tokens, so that
    it tests whether these tokens were in one text: prefix by prefix where attention looks back
    only, by changing one token after another where it looks both ways. Every returned text is in
    both spans at all its positions.

    It needs fewer tokens in the batch than the layer is wide. Choose it for language models, of
    which the embedding's gradient does not tell the order. Source: Petrov et al., arXiv 2405.15586
    (DAGER); the search for both ways is our own.

    Args:
        model: With the weights of the step.
        gradients: By parameter, as an observer has them.
        vocabulary: Number of tokens.
        positions: Of each text.
        texts: Texts in the batch, which the counts of rows tell.
        generator: Draws where a search starts; PyTorch's own if None.

    Returns:
        Distinct texts, int64, (found, positions).
    """
    nothing = torch.zeros(0, positions, dtype=torch.int64)
    layers = text_layers(model, vocabulary, positions)
    if layers is None or not {layers.first, layers.second} <= gradients.keys():
        return nothing
    rows = texts * positions
    first, second = (span_of(gradients[name], rows) for name in (layers.first, layers.second))
    if not (first.is_telling and second.is_telling):
        return nothing
    possible = tokens_at(model, layers.first, first, vocabulary, positions)
    if any(not 0 < len(ids) <= _MOST_TOKENS for ids in possible):
        return nothing

    def distances(ids_BP: Tensor) -> Tensor:
        t_BPI = inputs_of(model, ids_BP, [layers.second])[layers.second]
        return second.distances(t_BPI.flatten(0, 1)).view(ids_BP.shape)

    if layers.causal:
        return _by_prefixes(possible, distances, texts)
    tables = two_tables(model, gradients, vocabulary, positions)
    hints = None if tables is None else Hints.of(*tables)
    return _by_changes(possible, distances, texts, hints, generator)


def tokens_at(
    model: nn.Module, weight: str, span: Span, vocabulary: int, positions: int
) -> list[Tensor]:
    """Returns the tokens that may stand at each position, by the span of the first layer."""
    found = torch.zeros(vocabulary, positions, dtype=torch.bool)
    every_V = torch.arange(vocabulary)
    for ids_V in every_V.split(1024):
        t_VPI = inputs_of(model, ids_V[:, None].expand(-1, positions), [weight])[weight]
        found[ids_V] = span.contains(t_VPI.flatten(0, 1)).view(len(ids_V), positions)
    return [ids_V.nonzero().flatten() for ids_V in found.T]


def two_tables(
    model: nn.Module, gradients: Mapping[str, Tensor], vocabulary: int, positions: int
) -> tuple[Tensor, Tensor] | None:
    """Returns the gradients of the tables of tokens and of positions, if these are the first two.

    Args:
        model: With the names of the parameters.
        gradients: By parameter, as an observer has them.
        vocabulary: Number of tokens.
        positions: Of each text: the first rows of the second table.
    """
    tables = [n for n, module in model.named_modules() if isinstance(module, nn.Embedding)]
    found = [gradients.get(f"{name}.weight") for name in tables[:2]]
    if len(found) < 2 or found[0] is None or found[1] is None:
        return None
    tokens_VW, positions_PW = found[0], found[1][:positions]
    fits = len(tokens_VW) == vocabulary and len(positions_PW) == positions
    return (tokens_VW, positions_PW) if fits else None


_Distances = Callable[[Tensor], Tensor]


def _by_prefixes(possible: Sequence[Tensor], distances: _Distances, texts: int) -> Tensor:
    """Returns the texts all of whose prefixes are in the span."""
    prefixes_TP = torch.zeros(1, 0, dtype=torch.int64)
    for ids in possible:
        longer_TP = torch.cat(
            [prefixes_TP.repeat_interleave(len(ids), 0), ids.repeat(len(prefixes_TP))[:, None]],
            dim=1,
        )
        prefixes_TP = longer_TP[distances(longer_TP)[:, -1] < NEAR]
        if not 0 < len(prefixes_TP) <= _MOST_PREFIXES:
            return torch.zeros(0, len(possible), dtype=torch.int64)
    return prefixes_TP if len(prefixes_TP) <= texts else prefixes_TP[:0]


def _by_changes(
    possible: Sequence[Tensor],
    distances: _Distances,
    texts: int,
    hints: Hints | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Returns texts that a search finds from several starts, one token changed at a time."""
    found: list[Tensor] = []
    likely = possible if hints is None else hints.likely(possible)
    for number in range(_RESTARTS * texts):
        left = _without(likely, found) if number % 2 else likely
        if hints is not None and number < 2 * texts:
            start_P = hints.start(left, number)
        else:
            drawn = [ids[torch.randint(len(ids), (), generator=generator)] for ids in left]
            start_P = torch.stack(drawn)
        text_P = start_P
        for choices in (left, possible):
            text_P, is_found = _settled(text_P, choices, distances)
            if is_found:
                break
        if is_found and not any(torch.equal(text_P, other_P) for other_P in found):
            found.append(text_P)
        if len(found) == texts:
            break
    return torch.stack(found) if found else torch.zeros(0, len(possible), dtype=torch.int64)


def _without(likely: Sequence[Tensor], found: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tokens at each position that no text was found with, or all if none is left."""
    left = []
    for place, ids in enumerate(likely):
        used = torch.tensor([int(text_P[place]) for text_P in found], dtype=ids.dtype)
        rest = ids[~torch.isin(ids, used)]
        left.append(rest if len(rest) else ids)
    return left


@dataclass(frozen=True)
class Hints:
    """Guesses from the gradients of embeddings, to start a search from.

    A position's gradient is the sum of the deltas of the tokens that stood there, and a token's
    that of its own deltas: so a token of one use is a term of its position's sum. Deltas of one
    text resemble each other.

    Attributes:
        shares_VP: Share of each token's gradient in that of each position, by least squares.
        rows_VW: Gradient of each token, of length 1; 0 where it was not used.
    """

    shares_VP: Tensor
    rows_VW: Tensor

    @classmethod
    def of(cls, tokens_VW: Tensor, positions_PW: Tensor) -> Hints | None:
        """Makes hints of the gradients of both tables; None if the tokens' tell nothing."""
        ids = looked_up(tokens_VW)
        if not 0 < len(ids) <= tokens_VW.shape[1]:
            return None
        used_UW = tokens_VW[ids].double()
        shares_VP = tokens_VW.new_zeros(len(tokens_VW), len(positions_PW), dtype=torch.float64)
        shares_VP[ids] = torch.linalg.lstsq(used_UW.T, positions_PW.double().T).solution
        rows_VW = torch.zeros_like(tokens_VW, dtype=torch.float64)
        rows_VW[ids] = used_UW / used_UW.norm(dim=1, keepdim=True)
        return cls(shares_VP, rows_VW)

    def likely(self, possible: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tokens that are terms of each position's gradient, or all if none is."""
        chosen = [ids[self.shares_VP[ids, place] > _LIKELY] for place, ids in enumerate(possible)]
        return [some if len(some) else all for some, all in zip(chosen, possible, strict=True)]

    def start(self, choices: Sequence[Tensor], number: int) -> Tensor:
        """Returns a text of tokens whose deltas resemble those of one token, another per number."""
        place = number % len(choices)
        anchor = choices[place][number // len(choices) % len(choices[place])]
        found = [ids[(self.rows_VW[ids] @ self.rows_VW[anchor]).argmax()] for ids in choices]
        found[place] = anchor
        return torch.stack(found)


def _settled(
    text_P: Tensor, choices: Sequence[Tensor], distances: _Distances
) -> tuple[Tensor, bool]:
    """Returns the best text by changes of one token at a time, and whether the span has it all."""
    before = float("inf")
    for _ in range(_SWEEPS):
        for place, ids in enumerate(choices):
            tried_KP = text_P.repeat(len(ids), 1)
            tried_KP[:, place] = ids
            text_P = tried_KP[distances(tried_KP).mean(dim=1).argmin()]
        found_P = distances(text_P[None])[0]
        if bool((found_P < NEAR).all()):
            return text_P, True
        if float(found_P.mean()) >= before:
            break
        before = float(found_P.mean())
    return text_P, False
