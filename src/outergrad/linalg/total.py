"""A sum of gradients as one linear map, such as a step's gradient plus the residual."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from outergrad.linalg.product import Product, unit_of


@dataclass(frozen=True)
class Total:
    """The gradient `scale_G * sum(weight_G * part)`, without concatenating the parts.

    Attributes:
        parts: all of one shape.
        weights: of each part, (G,), at most 1; None where all are 1.
        scale_G: as in `Product`, of the largest part; NaN where a part is not finite.
    """

    parts: tuple[Product, ...]
    weights: tuple[Tensor, ...] | None
    scale_G: Tensor

    @property
    def inputs(self) -> int:
        """Number of columns, I."""
        return self.parts[0].inputs

    @property
    def outputs(self) -> int:
        """Number of rows, O."""
        return self.parts[0].outputs

    @property
    def largest_rank(self) -> int:
        """Upper bound of the gradient's rank."""
        return min(sum(part.largest_rank for part in self.parts), self.inputs, self.outputs)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation."""
        return reduce(torch.promote_types, (part.dtype for part in self.parts))

    def times(self, q_GIK: Tensor) -> Tensor:
        """Returns `dW q`, (G, O, K), without the scale."""
        return self._sum([part.times(q_GIK.to(part.dtype)) for part in self.parts])

    def transposed_times(self, p_GOK: Tensor) -> Tensor:
        """Returns `dWᵀ p`, (G, I, K), without the scale."""
        return self._sum([part.transposed_times(p_GOK.to(part.dtype)) for part in self.parts])

    def transposed(self) -> Total:
        """Returns the sum with inputs and outputs exchanged."""
        return Total(tuple(part.transposed() for part in self.parts), self.weights, self.scale_G)

    def without(self, p_GOK: Tensor) -> Total:
        """Returns the remainder `(1 - p pᵀ) dW`; see `Product.without`."""
        parts = tuple(part.without(p_GOK.to(part.dtype)) for part in self.parts)
        return Total(parts, self.weights, self.scale_G)

    @property
    def unit(self) -> float:
        """Divisor of norms before they are squared, as `Product.unit`."""
        return unit_of(self.scale_G, self.dtype)

    def energy(self, unit: float = 1.0) -> Tensor:
        """Squared Frobenius norm, (G,), float64, in squares of a unit."""
        if all(part.d_GNO is not None for part in self.parts):
            return self._stacked().energy(unit)
        return Product(self.formed(), None, self.scale_G).energy(unit)

    def formed(self) -> Tensor:
        """Returns the gradient itself, (G, O, I), without the scale."""
        return self._sum([part.formed().a_GNI for part in self.parts])

    def _stacked(self) -> Product:
        rows = [part.d_GNO for part in self.parts if part.d_GNO is not None]
        d_GNO = torch.cat(self._weighted(rows), dim=1)
        return Product(torch.cat([part.a_GNI for part in self.parts], dim=1), d_GNO, self.scale_G)

    def _sum(self, terms: list[Tensor]) -> Tensor:
        first, *others = self._weighted(terms)
        return sum(others, first)

    def _weighted(self, terms: list[Tensor]) -> list[Tensor]:
        if self.weights is None:
            return terms
        pairs = zip(terms, self.weights, strict=True)
        return [term * weight[:, None, None].to(term.dtype) for term, weight in pairs]


def total(*parts: Product) -> Product | Total:
    """Returns the sum of gradients of one shape; a single gradient is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    if all(part.scale_G is parts[0].scale_G for part in parts):
        return Total(parts, None, parts[0].scale_G)
    scale_G = torch.stack([part.scale_G for part in parts]).amax(dim=0)
    weights = tuple((part.scale_G / scale_G).nan_to_num(0.0) for part in parts)
    if all(bool((weight == 1).all()) for weight in weights):
        weights = None
    return Total(parts, weights, scale_G)
