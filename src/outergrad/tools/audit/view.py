"""An observer's view of a step: what the messages of sites tell whoever reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import urandom

import torch
from torch import Tensor

from outergrad.core.payload import Entries
from outergrad.core.sent import Kind, Sent, Way
from outergrad.core.types import Factors, Gradient, Place
from outergrad.linalg.gradients import add_gradients, as_tensor

_THERE = 1e-4
"""Share of the largest singular value from which on a direction counts, in few bits, too."""
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
        deltas: Deltas of the outputs of each block that is computed again, by its name, one tensor
            per output, as backward gave them. The last block's are `(p - y) / rows`, of
            cross-entropy: negative at each row's label alone.
        buffers: Values of buffers that the message holds, by name, after the forward: a running
            mean is `(1 - momentum) * before + momentum * mean of this batch`.
        sites: Number of sites that are summed.
        rounding: Error of the numbers, as a share of the largest ones.
    """

    gradients: Mapping[str, Tensor]
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    others: Sequence[Tensor] = ()
    deltas: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    sites: int = 1
    rounding: float = 1e-6


def view_of(
    sent: Sequence[Sent], params: Mapping[str, Tensor], *, changed_by: float | None = None
) -> View:
    """Returns the view of whoever reads these messages of one site, by the library's own decoding.

    Where there are two sketches of a gradient it is the smallest one that makes both.

    Args:
        sent: What the site has sent in one step, or exchange.
        params: Parameters of the model by name.
        changed_by: Factor by which gradients were subtracted from the weights, where what is sent
            is the difference that they made: it has the rounding of weights.
    """
    gradients: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    others: list[Tensor] = []
    deltas: dict[str, Sequence[Tensor]] = {}
    buffers: dict[str, Tensor] = {}
    sketches: dict[Place, Tensor] = {}
    for one in sent:
        content = one.content
        if one.kind == Kind.BUFFER:
            buffers[one.name] = as_tensor(_gradient(content))
        elif one.kind == Kind.SKETCH and one.slot is not None:
            sketches[one.slot.place] = as_tensor(_gradient(content))
        if one.kind != Kind.GRADIENT:
            continue
        if one.deltas:
            deltas[one.name] = one.deltas
        if isinstance(content, Tensor | Factors | Entries):
            if one.slot is not None:
                first = sketches.get(one.slot.place)
                if first is not None:
                    content = _both(first, as_tensor(content))
                add_gradients(gradients, one.slot, [content], params, one.scale)
                if isinstance(content, Factors) and not one.slot.lookup and _is_raw(content):
                    rows[one.name] = content.a_GRI[0]
            else:
                whole = one.scale * as_tensor(content)
                gradients[one.name] = whole + gradients.get(one.name, 0)
        else:
            others += [_matrix(t) for t in content if t.is_floating_point() and t.ndim > 1]
    seen = View(gradients=gradients, rows=rows, others=others, deltas=deltas, buffers=buffers)
    if changed_by is None:
        return seen
    eps = torch.finfo(torch.float32).eps
    weights = {name: float(params[name].detach().abs().max()) for name in gradients}
    changes = {name: changed_by * float(t.abs().max()) for name, t in gradients.items()}
    errors = [eps * weights[name] / (change + 1e-30) for name, change in changes.items()]
    rounding = max(View.rounding, *errors)
    return replace(seen, rounding=rounding)


def reaching(sent: Sequence[Sent], site: int) -> list[Sent]:
    """Returns what another site gets of a site's messages as they were sent: no terms of sums."""
    return [
        one
        for one in sent
        if one.way == Way.GATHERED or (one.way == Way.OWNED and one.owner == site)
    ]


def without(total: View, own: View) -> View:
    """Returns the sum over the other sites, for a site that takes its own part off the sum of all.

    Args:
        total: The sum over all sites.
        own: The part of this site.
    """
    found = {n: t - own.gradients.get(n, 0) for n, t in total.gradients.items()}
    return View(gradients=found, sites=total.sites - 1, rounding=total.rounding)


def merged(sent_S: Sequence[Sequence[Sent]], params: Mapping[str, Tensor]) -> View:
    """Returns the sum over all sites of what owners have merged, as they have sent it to all.

    Args:
        sent_S: What each site has sent.
        params: As for `view_of`.
    """
    sites = len(sent_S)
    told = [one for sent in sent_S for one in sent if one.kind == Kind.MERGED]
    means = [replace(one, kind=Kind.GRADIENT, scale=one.scale * sites) for one in told]
    return replace(view_of(means, params), rows={}, sites=sites)


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


def ways_of(sent: Sequence[Sent]) -> set[Way]:
    """Returns the ways of all gradients that a site sends."""
    return {one.way for one in sent if one.kind in (Kind.GRADIENT, Kind.SKETCH)}


def is_summed(sent: Sequence[Sent]) -> bool:
    """True if all gradients that a site sends are its part of sums over the sites."""
    return ways_of(sent) <= {Way.SUMMED}


def _gradient(content: object) -> Gradient:
    assert isinstance(content, Tensor | Factors)
    return content


def _both(first_GOI: Tensor, last_GOI: Tensor) -> Tensor:
    """Returns the smallest gradient of both sketches: `last + (1 - P Pᵀ) first`.

    The last is `P Pᵀ M`, and the first `M Q Q⁺`.
    """
    left_GOK, sizes_GK, _ = torch.linalg.svd(last_GOI.double(), full_matrices=False)
    there_GK = sizes_GK > _THERE * sizes_GK.amax(dim=1, keepdim=True)
    basis_GOK = left_GOK * there_GK[:, None]
    first = first_GOI.double()
    return (last_GOI + first - basis_GOK @ (basis_GOK.mT @ first)).to(last_GOI.dtype)


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
