"""Tests of whether a row is in the span of the rows that entered a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEAR = 1e-3
"""Relative distance from a span up to which a row is in it."""
_TELLING = 0.1
"""Relative distance that a foreign row must have on average for the test to tell anything."""


@dataclass(frozen=True)
class Span:
    """The space that the rows of a gradient lie in.

    Attributes:
        basis_RI: Orthonormal directions in float64, (rank, inputs).
    """

    basis_RI: Tensor

    @property
    def is_telling(self) -> bool:
        """True if a row that was not in the batch would stand out of the span."""
        rank, width = self.basis_RI.shape
        return rank > 0 and (1 - rank / width) ** 0.5 > _TELLING

    def distances(self, rows_CI: Tensor) -> Tensor:
        """Returns the part of each row outside of the span, relative to its norm, (candidates,)."""
        rows_CI = rows_CI.double()
        outside_CI = rows_CI - (rows_CI @ self.basis_RI.T) @ self.basis_RI
        return outside_CI.norm(dim=1) / rows_CI.norm(dim=1).clamp(min=1e-300)

    def contains(self, rows_CI: Tensor) -> Tensor:
        """Returns which rows are in the span, bool, (candidates,); none if it tells nothing."""
        return (self.distances(rows_CI) < NEAR) & self.is_telling


def span_of(gradient_OI: Tensor, rows: int | None = None, rounding: float = 1e-6) -> Span:
    """Returns the span of the rows that entered a layer, from its weight gradient.

    `dW = Δᵀ A` has the rows of A as the span of its own rows, as long as there are fewer rows than
    inputs and outputs, and their deltas are independent. Choose it to ask whether a given row (a
    token's embedding, a patch, a person's record) was in the batch. Source: Petrov et al., arXiv
    2405.15586 (DAGER).

    Args:
        gradient_OI: Gradient of the weight, (outputs, inputs).
        rows: Number of rows, if it is known: no further direction is counted.
        rounding: Singular values below this share of the largest are rounding.
    """
    _, values_R, basis_RI = torch.linalg.svd(gradient_OI.double(), full_matrices=False)
    rank = int((values_R > rounding * values_R[0]).sum()) if bool(values_R[0] > 0) else 0
    return Span(basis_RI[: rank if rows is None else min(rank, rows)])
