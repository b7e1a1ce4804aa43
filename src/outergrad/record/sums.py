"""Norms, angles and spectra of a weight's gradients, from squares and products of their parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outergrad.core.types import Factors, Gradient
from outergrad.linalg.inner import inner
from outergrad.linalg.leading import effective_rank, values_of_rows
from outergrad.linalg.outer import stack, widened

SPECTRUM = 16
"""Number of singular values that are recorded."""

_CANCELLING = 1e-7
"""Rounding error of a product's squared norm, relative to the product of its factors' ones."""

_ROUNDING = 1e-6
"""Relative rounding error of a squared norm."""


@dataclass
class Sums:
    """Squares and products over all matrices of a weight; None where not measured.

    Attributes:
        own: squared norm of this site's gradient.
        mean: squared norm of the mean gradient.
        both: inner product of these two.
        due: squared norm of what this site had to send: its gradient plus its residual.
        missing: squared norm of the part of that which it did not send.
        activations: squared norm of its activations.
        deltas: squared norm of its deltas.
        sigma: singular values of each matrix of the mean gradient, (G, K).
    """

    own: float | None = None
    mean: float | None = None
    both: float | None = None
    due: float | None = None
    missing: float | None = None
    activations: float | None = None
    deltas: float | None = None
    sigma: list[Tensor] = field(default_factory=list)

    def add(self, **terms: float) -> None:
        """Adds terms to the fields of these names."""
        for name, term in terms.items():
            before = getattr(self, name)
            setattr(self, name, term if before is None else before + term)

    def measured(self) -> dict[str, object]:
        """Returns fields of `events.Layer`, without those that were not measured."""
        norms = {
            "activation_norm": self.activations,
            "delta_norm": self.deltas,
            "gradient_norm": self._above_cancelling(self.own),
            "mean_norm": self.mean,
        }
        found: dict[str, object] = {n: _root(s) for n, s in norms.items() if s is not None}
        if self.due is not None and self.missing is not None:
            found["relative_error"] = _root(self.missing / self.due) if self.due else 0.0
        size = _root(norms["gradient_norm"] or 0.0) * _root(self.mean or 0.0)
        if self.both is not None and size != 0:
            cosine = self.both / size
            found["cosine"] = cosine if math.isnan(cosine) else min(max(cosine, -1.0), 1.0)
        if self.sigma:
            found |= self._spectrum()
        return found

    def _above_cancelling(self, square: float | None) -> float | None:
        """The square, but zero where rows cancel: rounding leaves a rest, of either sign."""
        if square is None or self.activations is None or self.deltas is None:
            return square
        return 0.0 if abs(square) < _CANCELLING * self.activations * self.deltas else square

    def _spectrum(self) -> dict[str, object]:
        falling = torch.cat([sigma_GK.flatten() for sigma_GK in self.sigma])
        falling = falling.sort(descending=True).values[:SPECTRUM]
        ranks_G = torch.cat([effective_rank(sigma_GK) for sigma_GK in self.sigma])
        return {
            "singular_values": tuple(falling.tolist()),
            "effective_rank": ranks_G.mean().item(),
        }


def _root(square: float) -> float:
    """Square root; 0 for a negative square, which rounding may leave."""
    return math.sqrt(square) if square > 0 else square * 0


class FactoredMean:
    """Mean gradient of few rows, measured by the Gram matrices of its factors."""

    def __init__(self, factors: Factors, scale: float) -> None:
        self._factors, self._scale = factors, scale
        d_GRO, a_GRI = widened(factors.d_GRO), widened(factors.a_GRI)
        self._deltas_GRR, self._activations_GRR = d_GRO @ d_GRO.mT, a_GRI @ a_GRI.mT

    @property
    def square(self) -> float:
        """Squared norm."""
        return (self._deltas_GRR * self._activations_GRR).sum().item() * self._scale**2

    @property
    def singular_values(self) -> Tensor:
        """Singular values in falling order, (G, at most R)."""
        most = min(self._factors.d_GRO.shape[2], self._factors.a_GRI.shape[2])
        return self._scale * values_of_rows(self._deltas_GRR, self._activations_GRR, most)

    def inner(self, own: Gradient) -> float:
        """Returns the inner product with another gradient."""
        return self._scale * inner(own, self._factors)


def squared_sum(gradient: Gradient, residual: Gradient | None) -> float:
    """Returns the squared norm of gradient plus residual."""
    square = inner(gradient, gradient)
    if residual is None:
        return square
    return square + 2 * inner(gradient, residual) + inner(residual, residual)


def above_rounding(missing: float, due: float) -> float:
    """Returns `missing`, but 0 if it may be a rounding error of the squared norm `due`."""
    return missing if missing > _ROUNDING * due else 0.0


def squared_loss(rows: Factors, arrives: Factors) -> float:
    """Returns the squared norm of `(D - D') A' + D (A - A')`: nothing large cancels in it."""
    of_deltas = Factors(rows.d_GRO - arrives.d_GRO, arrives.a_GRI)
    if rows.a_GRI.dim() == 1:  # ids are not encoded
        return inner(of_deltas, of_deltas)
    lost = stack([of_deltas, Factors(rows.d_GRO, rows.a_GRI - arrives.a_GRI)])
    return inner(lost, lost)
