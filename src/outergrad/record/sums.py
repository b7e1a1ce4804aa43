"""Norms, angles and spectra of the gradients of a weight, from squares and products of parts."""

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
"""Singular values that are recorded."""

_CANCELLING = 1e-7
"""Of the squared norm of a product of factors, relative to those of the factors."""

_ROUNDING = 1e-6
"""Of a squared norm, relative to it."""


@dataclass
class Sums:
    """Squares and products over all matrices of a weight; what was not measured is None.

    Attributes:
        own: squared norm of this site's gradient.
        mean: of the mean gradient.
        both: inner product of these.
        due: squared norm of what this site had to send.
        missing: of what it did not send of that.
        activations: of its activations.
        deltas: of its deltas.
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
        """Adds to each of them."""
        for name, term in terms.items():
            before = getattr(self, name)
            setattr(self, name, term if before is None else before + term)

    def measured(self) -> dict[str, object]:
        """As fields of `events.Layer`; without those that were not measured."""
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
        """Zero where rows cancel: rounding leaves something of them, of either sign."""
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
    """Rounding may leave less than nothing."""
    return math.sqrt(square) if square > 0 else square * 0


class FactoredMean:
    """A mean gradient of few rows: their Gram matrices tell what it is like."""

    def __init__(self, factors: Factors, scale: float) -> None:
        self._factors, self._scale = factors, scale
        d_GRO, a_GRI = widened(factors.d_GRO), widened(factors.a_GRI)
        self._deltas_GRR, self._activations_GRR = d_GRO @ d_GRO.mT, a_GRI @ a_GRI.mT

    @property
    def square(self) -> float:
        """The squared norm."""
        return (self._deltas_GRR * self._activations_GRR).sum().item() * self._scale**2

    @property
    def singular_values(self) -> Tensor:
        """All of them, falling, (G, R) or less."""
        most = min(self._factors.d_GRO.shape[2], self._factors.a_GRI.shape[2])
        return self._scale * values_of_rows(self._deltas_GRR, self._activations_GRR, most)

    def inner(self, own: Gradient) -> float:
        """With another gradient."""
        return self._scale * inner(own, self._factors)


def squared_sum(gradient: Gradient, residual: Gradient | None) -> float:
    """The squared norm of what is to be sent."""
    square = inner(gradient, gradient)
    if residual is None:
        return square
    return square + 2 * inner(gradient, residual) + inner(residual, residual)


def above_rounding(missing: float, due: float) -> float:
    """A difference of squares that are exact to about 1e-6."""
    return missing if missing > _ROUNDING * due else 0.0


def squared_loss(rows: Factors, arrives: Factors) -> float:
    """Of `(D - D') A' + D (A - A')`: nothing large cancels in it."""
    of_deltas = Factors(rows.d_GRO - arrives.d_GRO, arrives.a_GRI)
    if rows.a_GRI.dim() == 1:  # ids are not encoded
        return inner(of_deltas, of_deltas)
    lost = stack([of_deltas, Factors(rows.d_GRO, rows.a_GRI - arrives.a_GRI)])
    return inner(lost, lost)
