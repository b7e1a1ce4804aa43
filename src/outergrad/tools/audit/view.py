"""An observer's view of a step: what the messages of sites tell whoever reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import urandom

import torch
from torch import Tensor

from outergrad.core.payload import Entries
from outergrad.core.sent import Kind, Sent, Way
from outergrad.core.types import Factors
from outergrad.linalg.gradients import add_gradients, as_tensor

_ORTHONORMAL = 0.2
"""Departure of `A Aᵀ` from the unit matrix up to which factors are canonical, in few bits, too."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Gradients and rows of one site, or the sums over several, as an observer has them.

    Attributes:
        gradients: By parameter, in its shape; a parameter of which nothing is seen is absent.
        rows: Rows that a layer's message holds as they are, by weight, (rows, inputs): those of
            factors that are not canonical.
        others: Further matrices in the messages of blocks, each (rows, width).
        sites: Number of sites that are summed.
        rounding: Error of the numbers, as a share of the largest ones.
    """

    gradients: Mapping[str, Tensor]
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    others: Sequence[Tensor] = ()
    sites: int = 1
    rounding: float = 1e-6


def view_of(
    sent: Sequence[Sent], params: Mapping[str, Tensor], *, changed_by: float | None = None
) -> View:
    """Returns the view of whoever reads all messages of one site, by the library's own decoding.

    Args:
        sent: What the site has sent in one step, or exchange.
        params: Parameters of the model by name.
        changed_by: Factor by which gradients were subtracted from the weights, where what is sent
            is the difference that they made: it has the rounding of weights.
    """
    gradients: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    others: list[Tensor] = []
    for one in sent:
        content = one.content
        if one.kind != Kind.GRADIENT:
            continue
        if isinstance(content, Tensor | Factors | Entries):
            if one.slot is not None:
                add_gradients(gradients, one.slot, [content], params, one.scale)
                if isinstance(content, Factors) and not one.slot.lookup and _is_raw(content):
                    rows[one.name] = content.a_GRI[0]
            else:
                whole = one.scale * as_tensor(content)
                gradients[one.name] = whole + gradients.get(one.name, 0)
        else:
            others += [_matrix(t) for t in content if t.is_floating_point() and t.ndim > 1]
    if changed_by is None:
        return View(gradients=gradients, rows=rows, others=others)
    eps = torch.finfo(torch.float32).eps
    weights = {name: float(params[name].detach().abs().max()) for name in gradients}
    changes = {name: changed_by * float(t.abs().max()) for name, t in gradients.items()}
    errors = [eps * weights[name] / (change + 1e-30) for name, change in changes.items()]
    rounding = max(View.rounding, *errors)
    return View(gradients=gradients, rows=rows, others=others, rounding=rounding)


def summed(views: Sequence[View]) -> View:
    """Returns what is seen of several sites by whoever gets sums alone."""
    names = set[str]().union(*(view.gradients for view in views))
    found = {
        name: sum((v.gradients[name] for v in views if name in v.gradients), torch.zeros(()))
        for name in sorted(names)
    }
    rounding = max(view.rounding for view in views)
    return View(gradients=found, sites=len(views), rounding=rounding)


def masked(view: View) -> View:
    """Returns what a hub reads that adds up under masks: the library's own, with fresh secrets."""
    from outergrad.star.fixed_point import CARRIERS
    from outergrad.star.masks import NONCE_BYTES, Masks

    masks = Masks({1: urandom(32)}, urandom(32), rank=0)
    carrier = CARRIERS[torch.float32]
    found: dict[str, Tensor] = {}
    for name, t in view.gradients.items():
        unit = carrier.unit(carrier.exponent(float(t.abs().max())), sites=2)
        whole = (t.double() * 2.0**-unit).round().flatten().to(torch.int32).numpy()
        masks.hide(whole, urandom(NONCE_BYTES))
        found[name] = torch.from_numpy(whole).to(t.dtype).view(t.shape) * 2.0**unit
    return View(gradients=found)


def is_summed(sent: Sequence[Sent]) -> bool:
    """True if all that a site sends is its part of sums over the sites."""
    return all(one.way == Way.SUMMED for one in sent)


def _is_raw(factors: Factors) -> bool:
    """True if neither factor is orthonormal: then they are rows of activations and deltas."""
    return not any(_is_orthonormal(t) for t in (factors.d_GRO[0], factors.a_GRI[0]))


def _is_orthonormal(t_RW: Tensor) -> bool:
    gram_RR = t_RW.double() @ t_RW.double().T
    used_R = gram_RR.diagonal() > 0  # fewer rows than agreed leave zeros behind them
    unit_RR = torch.diag(used_R.to(gram_RR))
    return bool(((gram_RR - unit_RR).abs() <= _ORTHONORMAL).all())


def _matrix(t: Tensor) -> Tensor:
    return t.flatten(1) if t.ndim > 2 else t
