"""Norms of single samples' gradients and weighted sums of these, at the cost of one product.

Letters: B samples, N rows, G groups, L rows of the sample that has most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outergrad.core.transform import SampleRows, SiteGradient
from outergrad.core.types import Slot
from outergrad.linalg.gradients import add_rows
from outergrad.linalg.outer import widened
from outergrad.linalg.sample_products import places_of
from outergrad.linalg.site_gradient import formed, sample_norms, scaled_samples, together

_MOST = 2
"""Numbers in the products of samples that are kept, per number in the rows that make them."""


@dataclass(frozen=True)
class _Products:
    """Products of one slot by sample, weight (B, G, O, I) and bias (B, G, O)."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(slot: Slot, part: SampleRows, samples: int) -> _Products:
        assert part.samples_N is not None
        d_GNO, where = widened(part.factors.d_GRO), places_of(part.samples_N, samples)
        d_BGLO = where.padded(d_GNO)
        a_BGLI = where.padded(part.factors.a_GRI.to(d_GNO.dtype))
        return _Products(d_BGLO.mT @ a_BGLI, None if slot.bias is None else d_BGLO.sum(dim=2))

    def norms(self) -> Tensor:
        """Norm of each sample's product with its bias, (B,)."""
        norms_B = torch.linalg.vector_norm(self.weight, dim=(1, 2, 3))
        if self.bias is None:
            return norms_B
        return torch.hypot(norms_B, torch.linalg.vector_norm(self.bias, dim=(1, 2)))


class SampleSums:
    """Gradients of single samples of a site, for one question for norms and one for their sum.

    Where all samples' products of a layer take no more than twice the memory of the rows that make
    them, as in transformers of ordinary width, they are formed once, and kept between the two.
    Elsewhere norms come from Gram matrices (`sample_norms`).

    Args:
        gradient: with the sample of each row.
    """

    def __init__(self, gradient: SiteGradient) -> None:
        rows, samples = gradient.rows, gradient.samples
        alone = [slots[0] for slots in together(rows) if len(slots) == 1]
        kept = [slot for slot in alone if _pays(slot, rows[slot], samples)]
        self._kept = {slot: _Products.of(slot, rows[slot], samples) for slot in kept}
        others = {slot: part for slot, part in rows.items() if slot not in self._kept}
        self._gradient, self._others = gradient, replace(gradient, rows=others)
        self._wide = {name: _wide_like(p) for name, p in gradient.params.items()}

    def norms(self) -> Tensor:
        """Euclidean norm of each sample's gradient over all parameters, (B,)."""
        parts = [products.norms() for products in self._kept.values()]
        if self._others.rows or self._others.formed or not parts:
            parts.append(sample_norms(self._others))
        return torch.linalg.vector_norm(torch.stack(parts), dim=0)

    def summed(self, factor_B: Tensor) -> SiteGradient:
        """Returns the sum of the samples' gradients, each times its factor, formed.

        In at least float32. It is to be rounded to the parameters' type with noise on it, and not
        before: a single sample could change the errors of all numbers of the sum.
        """
        found: dict[str, Tensor] = {}
        for slot, products in self._kept.items():
            self._add(found, slot.weight, slot.weight_rows, products.weight, factor_B)
            if slot.bias is not None and products.bias is not None:
                self._add(found, slot.bias, slot.bias_rows, products.bias, factor_B)
        for slot, part in self._others.rows.items():  # one by one: scaled rows are copies
            named = {name: self._wide[name] for name in slot.params}
            wide = part._replace(factors=part.factors._replace(d_GRO=widened(part.factors.d_GRO)))
            one = replace(self._others, rows={slot: wide}, formed={}, params=named)
            for name, g in formed(scaled_samples(one, factor_B)).formed.items():
                add_rows(found, name, None, g, self._wide[name])
        for name, g in scaled_samples(replace(self._others, rows={}), factor_B).formed.items():
            add_rows(found, name, None, g, self._wide[name])
        return formed(replace(self._gradient, rows={}, formed=found))

    def _add(
        self,
        found: dict[str, Tensor],
        name: str,
        rows: tuple[int, int] | None,
        parts: Tensor,
        factor_B: Tensor,
    ) -> None:
        value = factor_B.to(parts.dtype) @ parts.flatten(1)
        p = self._wide[name]
        add_rows(found, name, rows, value.to(p.dtype), p)


def _wide_like(p: Tensor) -> Tensor:
    """Returns a tensor of the shape of a parameter, of one number in at least float32."""
    return widened(p.new_zeros(())).expand(p.shape)


def _pays(slot: Slot, part: SampleRows, samples: int) -> bool:
    """True if products by sample are to be kept; not those of lookups, which have the whole table.

    With an unknown sample `sample_norms` raises.
    """
    rows = part.factors.d_GRO.shape[1]
    if slot.lookup or part.samples_N is None or not rows:
        return False
    return samples * slot.outputs * slot.inputs <= _MOST * rows * (slot.outputs + slot.inputs)
