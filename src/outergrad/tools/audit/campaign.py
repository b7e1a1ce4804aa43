"""Campaign: all attacks that fit a model, on one view of a step, each beside the truth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outergrad.tools.audit.attacks.bags import tokens_by_position
from outergrad.tools.audit.attacks.deeper import inner_members
from outergrad.tools.audit.attacks.hidden import rows_behind
from outergrad.tools.audit.attacks.labels import label_counts
from outergrad.tools.audit.attacks.matching import matched
from outergrad.tools.audit.attacks.membership import membership_scores
from outergrad.tools.audit.attacks.patches import Cut, image_in_span, patches_by_positions
from outergrad.tools.audit.attacks.rows import alone_rows
from outergrad.tools.audit.attacks.signs import labels_by_signs
from outergrad.tools.audit.attacks.span import Span, span_of
from outergrad.tools.audit.attacks.spear import spear
from outergrad.tools.audit.attacks.text import read_texts, two_tables
from outergrad.tools.audit.attacks.tokens import looked_up
from outergrad.tools.audit.figures import auc, auc_deviation, psnr_db, ssim
from outergrad.tools.audit.findings import SHOWN, Finding, Truth, of_members, of_rows
from outergrad.tools.audit.places import Places
from outergrad.tools.audit.texts import paired
from outergrad.tools.audit.view import View

SEED = 0
_MOST_MEMBERS = 32
MOST_MATCHED = 2
"""Rows up to which inputs are matched by optimisation: with more, nothing recognisable comes."""
_RECOGNISABLE_DB, _RECOGNISABLE_SSIM = 20.0, 0.6
"""PSNR or SSIM from which on an input counts as found by matching: a norm hides brightness, which
PSNR counts and SSIM hardly."""


class Campaign:
    """All attacks on a model, with the weights that every observer has.

    Args:
        model: With the weights of the step.
        places: Its layers.
    """

    def __init__(self, model: nn.Module, places: Places) -> None:
        self._model, self._places = model, places
        self._judge = copy.deepcopy(model).eval()  # a norm over a batch of one would be another

    def on(self, view: View, truth: Truth, *, matching: bool = False) -> list[Finding]:
        """Returns what each attack finds in a view.

        Args:
            view: What the observer has.
            truth: The batch behind it.
            matching: Whether to match inputs by optimisation, too, for up to two rows.
        """
        attacks: list[Callable[[View, Truth], Iterator[Finding]]] = [
            self._rows_as_sent,
            self._rows,
            self._rows_by_spear,
            self._rows_behind_activations,
            self._rows_by_positions,
            self._rows_by_patches,
            self._tokens,
            self._tokens_at_positions,
            self._texts,
            self._labels,
            self._labels_by_signs,
            self._members_by_span,
            self._members_by_inner_spans,
            self._members_by_products,
        ]
        if matching and len(truth.x) <= MOST_MATCHED:
            attacks.append(self._inputs_by_matching)
        return [finding for attack in attacks for finding in attack(view, truth)]

    def _of_layer(self, view: View, layer: str | None) -> tuple[Tensor, Tensor] | None:
        """Returns weight and bias gradient of a layer, if both are seen."""
        found = view.gradients.get(f"{layer}.weight"), view.gradients.get(f"{layer}.bias")
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    def _own(self, layer: str) -> tuple[Tensor, Tensor]:
        module = self._model.get_submodule(layer)
        return module.get_parameter("weight").detach(), module.get_parameter("bias").detach()

    # -- rows of data -----------------------------------------------------------------------------

    def _rows_as_sent(self, view: View, truth: Truth) -> Iterator[Finding]:
        layer = self._places.data
        if layer is not None and (rows := view.rows.get(f"{layer}.weight")) is not None:
            yield of_rows("rows in the message", layer, rows.double(), truth)

    def _rows(self, view: View, truth: Truth) -> Iterator[Finding]:
        layer = self._places.data
        if layer is not None and (seen := self._of_layer(view, layer)) is not None:
            yield of_rows("rows by division", layer, alone_rows(*seen, view.rounding), truth)

    def _rows_by_spear(self, view: View, truth: Truth) -> Iterator[Finding]:
        layer = self._places.data
        if layer is None or not self._places.is_rectified:
            return
        if (seen := self._of_layer(view, layer)) is not None:
            about = {"rounding": view.rounding, "generator": _generator()}
            rows = spear(*seen, *self._own(layer), **about)
            yield of_rows("rows by SPEAR", layer, rows, truth)

    def _rows_behind_activations(self, view: View, truth: Truth) -> Iterator[Finding]:
        layer = self._places.data
        if layer is None or not self._places.is_rectified:
            return
        weight_OI, bias_O = self._own(layer)
        sent = [*view.rows.values(), *view.others]
        hidden = [t for t in sent if t.shape[1] == len(weight_OI) and bool((t >= 0).all())]
        gradient = view.gradients.get(f"{layer}.weight")
        if not hidden or gradient is None:
            return
        basis_RI = span_of(gradient, rounding=view.rounding).basis_RI
        found = max((rows_behind(t, weight_OI, bias_O, basis_RI) for t in hidden), key=len)
        yield of_rows("rows behind activations", layer, found, truth)

    # -- images behind a convolution --------------------------------------------------------------

    def _cut(self, view: View, truth: Truth) -> tuple[str, Cut, Tensor] | None:
        """Returns the first convolution, how it cuts images, and its gradient as a matrix."""
        layer = self._places.patches
        gradient = view.gradients.get(f"{layer}.weight")
        if layer is None or gradient is None:
            return None
        module = self._model.get_submodule(layer)
        assert isinstance(module, nn.Conv2d)
        cut = Cut.of(module, truth.x.shape[1:])
        return None if cut is None else (layer, cut, gradient.flatten(1))

    def _rows_by_positions(self, view: View, truth: Truth) -> Iterator[Finding]:
        place, seen = self._places.positions, self._cut(view, truth)
        if place is None or seen is None or (table := view.gradients.get(place[0])) is None:
            return
        layer, cut, gradient_OK = seen
        count = cut.patches(truth.x[:1]).shape[1]
        positions_PO = table.flatten(0, -2)[place[1] : place[1] + count]
        found = patches_by_positions(gradient_OK, positions_PO)
        images = [cut.image(found).flatten()] if len(found) else []
        rows = torch.stack(images) if images else truth.x[:0].flatten(1).double()
        yield of_rows("rows by positions", layer, rows, truth)

    def _rows_by_patches(self, view: View, truth: Truth) -> Iterator[Finding]:
        if (seen := self._cut(view, truth)) is None:
            return
        layer, cut, gradient_OK = seen
        span = span_of(gradient_OK, rounding=view.rounding)
        bias = view.gradients.get(f"{layer}.bias")
        found = image_in_span(span, cut, gradient_OK, bias)
        yield of_rows("rows by patches", layer, found.flatten(1), truth)

    # -- texts ------------------------------------------------------------------------------------

    def _tokens(self, view: View, truth: Truth) -> Iterator[Finding]:
        layer = self._places.tokens
        if layer is None or (table := view.gradients.get(f"{layer}.weight")) is None:
            return
        ids, true = set(looked_up(table).tolist()), set(truth.x.unique().tolist())
        yield Finding(
            attack="tokens in the table",
            layer=layer,
            found=len(ids & true),
            of=len(true),
            false=len(ids - true),
            canaries=len(set(truth.outside[0].unique().tolist()) - true),
            figure=f"{len(ids & true)} of {len(true)} tokens",
        )

    def _tokens_at_positions(self, view: View, truth: Truth) -> Iterator[Finding]:
        if truth.vocabulary is None or self._places.tokens is None:
            return
        positions = truth.x.shape[1]
        tables = two_tables(self._model, view.gradients, truth.vocabulary, positions)
        if tables is None:
            return
        claimed = tokens_by_position(*tables)
        found = {(place, int(i)) for place, ids in enumerate(claimed) for i in ids}
        true, outside = (_at_positions(x) for x in (truth.x, truth.outside[0]))
        yield Finding(
            attack="tokens at positions",
            layer=self._places.tokens,
            found=len(found & true),
            of=len(true),
            false=len(found - true),
            canaries=len(outside - true),
            figure=f"{len(found & true)} of {len(true)} tokens at their positions",
        )

    def _texts(self, view: View, truth: Truth) -> Iterator[Finding]:
        if truth.vocabulary is None or self._places.tokens is None:
            return
        texts, positions = truth.x.shape
        about = {"vocabulary": truth.vocabulary, "positions": positions, "texts": texts}
        found = read_texts(self._model, view.gradients, **about, generator=_generator())
        back, true = ({tuple(text) for text in t.tolist()} for t in (found, truth.x))
        yield Finding(
            attack="texts by spans",
            layer="attention",
            found=len(back & true),
            of=len(true),
            false=len(back - true),
            canaries=len(truth.outside[0]),
            figure=f"{len(back & true)} of {len(true)} texts",
            pairs=paired(truth.x, found, SHOWN),
        )

    # -- labels -----------------------------------------------------------------------------------

    def _labels(self, view: View, truth: Truth) -> Iterator[Finding]:
        layer = self._places.labels
        if layer is None or (seen := self._of_layer(view, layer)) is None:
            return
        # A sum over sites is of means, each over as many rows.
        weight, bias = (t / view.sites for t in seen)
        rows = len(truth.y)
        counts = label_counts(*self._own(layer), weight, bias, rows)
        true = torch.bincount(truth.y, minlength=len(bias))
        right = int(torch.minimum(counts, true).sum())
        even = torch.full((len(bias),), rows / len(bias))
        yield Finding(
            attack="labels",
            layer=layer,
            found=right,
            of=rows,
            guessed=float(torch.minimum(even, true).sum()),
            false=rows - right,
            figure=f"{right} of {rows} labels",
        )

    def _labels_by_signs(self, view: View, truth: Truth) -> Iterator[Finding]:
        """Labels of the rows in the order of the message, which is that of the batch."""
        layer, rows = self._places.labels, len(truth.y)
        if layer is None or view.sites > 1 or truth.y.ndim > 1:
            return
        classes = len(self._model.get_submodule(layer).get_parameter("weight"))
        deltas = [t for t in view.others if t.shape == (rows, classes)]
        if not deltas:
            return
        found = max((labels_by_signs(t) for t in deltas), key=len)
        right = int((found == truth.y).sum()) if len(found) else 0
        yield Finding(
            attack="labels by signs",
            layer=layer,
            found=right,
            of=rows,
            guessed=rows / classes,
            false=len(found) - right,
            figure=f"{right} of {rows} labels, row by row",
        )

    # -- members ----------------------------------------------------------------------------------

    def _members_by_span(self, view: View, truth: Truth) -> Iterator[Finding]:
        layer = self._places.data
        if layer is not None and (gradient := view.gradients.get(f"{layer}.weight")) is not None:
            span = span_of(gradient, rounding=view.rounding)
            named = [span.contains(x.flatten(1)) for x in (truth.x, truth.outside[0])]
            yield of_members("members by the span", layer, *named)
        elif (seen := self._cut(view, truth)) is not None:
            layer, cut, gradient_OK = seen
            span = span_of(gradient_OK, rounding=view.rounding)
            named = [_all_in(span, cut.patches(x)) for x in (truth.x, truth.outside[0])]
            yield of_members("members by the span", layer, *named)

    def _members_by_inner_spans(self, view: View, truth: Truth) -> Iterator[Finding]:
        if self._places.patches is None:
            return
        tried = torch.cat([truth.x, truth.outside[0]])
        found = inner_members(self._judge, view.gradients, tried, view.rounding)
        layer, named = found or ("none", torch.zeros(len(tried), dtype=torch.bool))
        members, canaries = named.split([len(truth.x), len(truth.outside[0])])
        yield of_members("members by inner spans", layer, members, canaries)

    def _members_by_products(self, view: View, truth: Truth) -> Iterator[Finding]:
        tried = slice(_MOST_MEMBERS)  # each takes a backward
        members = self._scores(view, truth.x[tried], truth.y[tried])
        others = self._scores(view, *truth.outside)
        found = auc(members, others)
        yield Finding(
            attack="members by products",
            layer="all",
            found=found,
            of=0,
            deviation=auc_deviation(len(members), len(others)),
            false=int((others > members.median()).sum()),
            canaries=len(others),
            figure=f"AUC {found:.2f}",
        )

    def _scores(self, view: View, x: Tensor, y: Tensor) -> Tensor:
        own = [self._gradients(a[None], b[None]) for a, b in zip(x, y, strict=True)]
        return membership_scores(view.gradients, own)

    def _gradients(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        named = {n: p for n, p in self._judge.named_parameters() if p.requires_grad}
        loss = cross_entropy(self._judge(x), y)
        found = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
        return {n: g for n, g in zip(named, found, strict=True) if g is not None}

    # -- the last resort --------------------------------------------------------------------------

    def _inputs_by_matching(self, view: View, truth: Truth) -> Iterator[Finding]:
        if not truth.x.is_floating_point() or not view.gradients:
            return
        y = truth.y  # whether these come back is another line

        def loss(output: Tensor) -> Tensor:
            return cross_entropy(output, y)

        shape = tuple(truth.x.shape)
        low, high = truth.outside[0].aminmax()  # everybody knows what pixels are like
        about = {"bounds": (float(low), float(high)), "generator": _generator()}
        back = matched(self._model, view.gradients, shape, loss, **about)
        pairs = [*zip(truth.x, back, strict=True)]
        near_db = [psnr_db(b, t) for t, b in pairs]
        told = f"PSNR {sum(near_db) / len(pairs):.0f} dB"
        alike = [0.0] * len(pairs)
        if truth.x.ndim == 4:
            alike = [ssim(b, t) for t, b in pairs]
            told += f", SSIM {sum(alike) / len(pairs):.2f}"
        judged = zip(near_db, alike, strict=True)
        seen = sum(db > _RECOGNISABLE_DB or one > _RECOGNISABLE_SSIM for db, one in judged)
        yield Finding(
            attack="inputs by matching",
            layer="all",
            found=seen,
            of=len(pairs),
            figure=told,
            by_quality=True,
            pairs=pairs,
        )


def _all_in(span: Span, patches_NPK: Tensor) -> Tensor:
    """Returns the images all of whose patches are in a span, bool, (images,)."""
    return span.contains(patches_NPK.flatten(0, 1)).view(patches_NPK.shape[:2]).all(dim=1)


def _at_positions(ids_NP: Tensor) -> set[tuple[int, int]]:
    """Returns all pairs of a position and a token there."""
    return {(place, i) for place, ids in enumerate(ids_NP.T.tolist()) for i in ids}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)
