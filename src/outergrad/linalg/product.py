"""A weight gradient as a linear map, `x -> dᵀ (a x)`, that need not be formed to be decomposed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from outergrad.core.types import Gradient

_SAFE = (2.0**-24, 2.0**16)
"""Range of the largest entry within which no scaling is needed: even the squares of products of a
million terms stay within the range of float32. Copying a factor costs as much as an iteration."""

_NEAR = (2.0**-200, 2.0**200)
"""Scales that can be squared."""


@dataclass(frozen=True)
class Product:
    """The gradient `scale_G * d_GNOᵀ a_GNI`, with factors whose squares are within range.

    Attributes:
        a_GNI: activations in float32 or float64, scaled if need be; the scaled gradient itself,
            (G, O, I), where it is formed.
        d_GNO: deltas, likewise; None where the gradient is formed.
        scale_G: powers of two, float64, that multiply the singular values at the end. NaN where
            a factor is not finite; the factors are zero there, because LAPACK may raise on NaN.
    """

    a_GNI: Tensor
    d_GNO: Tensor | None
    scale_G: Tensor

    @property
    def inputs(self) -> int:
        """Number of columns, I."""
        return self.a_GNI.shape[2]

    @property
    def outputs(self) -> int:
        """Number of rows, O."""
        return self.a_GNI.shape[1] if self.d_GNO is None else self.d_GNO.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation."""
        return self.a_GNI.dtype

    @property
    def largest_rank(self) -> int:
        """Upper bound of the gradient's rank: min(N, I, O)."""
        return min(self.a_GNI.shape[1], self.inputs, self.outputs)

    def times(self, q_GIK: Tensor) -> Tensor:
        """Returns `dᵀ (a q)`, (G, O, K), without the scale."""
        y_GNK = self.a_GNI @ q_GIK
        return y_GNK if self.d_GNO is None else _transposed_times(self.d_GNO, y_GNK)

    def transposed_times(self, p_GOK: Tensor) -> Tensor:
        """Returns `aᵀ (d p)`, (G, I, K), without the scale."""
        y_GNK = p_GOK if self.d_GNO is None else self.d_GNO @ p_GOK
        return _transposed_times(self.a_GNI, y_GNK)

    def transposed(self) -> Product:
        """Returns the gradient with inputs and outputs exchanged."""
        if self.d_GNO is None:
            return Product(self.a_GNI.mT, None, self.scale_G)
        return Product(self.d_GNO, self.a_GNI, self.scale_G)

    def formed(self) -> Product:
        """Returns the gradient as one dense matrix."""
        if self.d_GNO is None:
            return self
        return Product(self.d_GNO.mT @ self.a_GNI, None, self.scale_G)

    @property
    def unit(self) -> float:
        """Divisor of norms before they are squared; see `unit_of`."""
        return unit_of(self.scale_G, self.dtype)

    def energy(self, unit: float = 1.0) -> Tensor:
        """Squared Frobenius norm, (G,), float64, in squares of a unit.

        `‖dᵀ a‖² = tr(aᵀ d dᵀ a) = sum((a aᵀ) * (d dᵀ))`: N x N Gram matrices are enough. Where the
        rows cancel, rounding may give a negative sum, which counts as zero.
        """
        if self.d_GNO is None:
            squares = self.a_GNI.square()
        else:
            squares = (self.a_GNI @ self.a_GNI.mT) * (self.d_GNO @ self.d_GNO.mT)
        energy_G = squares.sum(dim=(1, 2), dtype=torch.float64).clamp(min=0)
        return energy_G * (self.scale_G / unit).square()

    def without(self, p_GOK: Tensor) -> Product:
        """Returns the remainder `(1 - p pᵀ) dᵀ a` without the part along orthonormal columns p.

        The remainder of an outer product is one again, `(d - d p pᵀ)ᵀ a`. Its energy has the
        accuracy of the remainder, unlike a difference of two energies.
        """
        if self.d_GNO is None:
            rest_GOI = self.a_GNI - p_GOK @ (p_GOK.mT @ self.a_GNI)
            return Product(rest_GOI, None, self.scale_G)
        return Product(self.a_GNI, self.d_GNO - (self.d_GNO @ p_GOK) @ p_GOK.mT, self.scale_G)


def product(gradient: Gradient) -> Product:
    """Returns the gradient of factors, d_GNO and a_GNI of any floating dtype, or a formed one.

    b_GO is ignored. Half precision is computed in float32. A gradient without rows becomes one row
    of zeros.
    """
    (a_GNI, scale_a_G), *deltas = map(_scaled, _in_one_dtype(gradient))
    if not deltas:
        return Product(a_GNI, None, scale_a_G)
    d_GNO, scale_d_G = deltas[0]
    both = scale_a_G if scale_a_G is scale_d_G else scale_a_G * scale_d_G  # both are `_ones`
    return Product(a_GNI, d_GNO, both)


def unit_of(scale_G: Tensor, dtype: torch.dtype) -> float:
    """A power of two in which squared norms stay within float64: 1 but for extreme float64 numbers.

    Args:
        scale_G: factors of the scaled numbers, as in `Product`.
        dtype: of the computation; squares of float32 numbers are never out of range.
    """
    if dtype != torch.float64:
        return 1.0
    largest = scale_G.nan_to_num(0.0).amax().item()
    return 1.0 if largest == 0 or _NEAR[0] < largest < _NEAR[1] else largest


def unscaled(gradient: Gradient) -> Product:
    """Returns the gradient without scaling its factors, which saves a pass over them.

    Nothing is squared as long as it is multiplied only by vectors of length one, and elements that
    are not finite stay so.
    """
    a_GNI, *deltas = _in_one_dtype(gradient)
    return Product(a_GNI, deltas[0] if deltas else None, _ones(len(a_GNI), a_GNI.device))


def _in_one_dtype(gradient: Gradient) -> list[Tensor]:
    tensors = [gradient] if isinstance(gradient, Tensor) else [gradient.a_GRI, gradient.d_GRO]
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    return [t.to(dtype) for t in tensors]


def cheapest(gradient: Product, columns: int, sweeps: int, *, with_energy: bool) -> Product:
    """Returns the gradient, formed if that makes the work ahead cheaper.

    Counts multiplications. A pass through the factors costs N (I + O) per column, through the
    formed gradient I O; forming it costs N I O, and the Gram matrices for the energy N² (I + O).

    Args:
        gradient: returned unchanged if it is formed already.
        columns: K, the number of vectors multiplied at a time.
        sweeps: multiplications by the gradient and back.
        with_energy: whether `energy` of a remainder will be needed.
    """
    if gradient.d_GNO is None:
        return gradient
    rows, inputs, outputs = gradient.a_GNI.shape[1], gradient.inputs, gradient.outputs
    vectors = 2 * columns * sweeps
    through_factors = (vectors + (rows if with_energy else 0)) * rows * (inputs + outputs)
    through_formed = (vectors + rows) * inputs * outputs
    return gradient.formed() if through_formed < through_factors else gradient


@lru_cache(maxsize=64)
def _ones(groups: int, device: torch.device) -> Tensor:
    return torch.ones(groups, dtype=torch.float64, device=device)


def _transposed_times(x_GNW: Tensor, y_GNK: Tensor) -> Tensor:
    """`xᵀ y`, written so that BLAS reads x along its rows: three times as fast for thin y."""
    return (y_GNK.mT @ x_GNW).mT


def _scaled(x_GNW: Tensor) -> tuple[Tensor, Tensor]:
    """Entries whose products are safe, and the power of two to multiply them by; see `Product`."""
    if x_GNW.shape[1] == 0:
        x_GNW = x_GNW.new_zeros(x_GNW.shape[0], 1, x_GNW.shape[2])
    peak_G = _peak(x_GNW)
    if bool(((peak_G > _SAFE[0]) & (peak_G < _SAFE[1])).all()):
        return x_GNW, _ones(len(peak_G), peak_G.device)
    peak_G = peak_G.clamp(min=torch.finfo(x_GNW.dtype).tiny)
    # Dividing by twice the mantissa, which is in [1, 2), is exact; infinity gives NaN.
    scale_G = peak_G / (2 * torch.frexp(peak_G).mantissa)
    scaled_GNW = x_GNW / scale_G[:, None, None]
    return scaled_GNW.masked_fill(scale_G.isnan()[:, None, None], 0.0), scale_G.double()


def _peak(x_GNW: Tensor) -> Tensor:
    """Largest magnitude per group; NaN if the group has one."""
    if x_GNW.shape[0] > 1:
        return x_GNW.abs().amax(dim=(1, 2))
    low, high = x_GNW.aminmax()  # no copy as in abs(): a third of the time
    return torch.maximum(-low, high)[None]


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
