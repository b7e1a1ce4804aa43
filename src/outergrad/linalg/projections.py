"""Projections of a weight's gradient on a few directions, or on some of its entries.

Letters: B samples, L rows of the sample that has most, O and I output and input width, K directions
or entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outergrad.linalg.sample_products import Product


@dataclass(frozen=True)
class OnDirections:
    """Projection on directions of one side: a matrix of rank K at most.

    Attributes:
        basis: orthonormal directions, (O, K) or (I, K).
        left: whether they are directions of the outputs.
    """

    basis: Tensor
    left: bool

    def coordinates(self, matrix_OI: Tensor) -> Tensor:
        """Returns `Pᵀ M`, (K, I), or `M Q`, (O, K)."""
        basis = self.basis.to(matrix_OI)
        return basis.mT @ matrix_OI if self.left else matrix_OI @ basis

    def matrix(self, coordinates: Tensor) -> Tensor:
        """Returns the matrix with these coordinates, (O, I)."""
        basis = self.basis.to(coordinates)
        return basis @ coordinates if self.left else coordinates @ basis.mT

    def squared_norms(self, d_BLO: Tensor, a_BLI: Tensor) -> Tensor:
        """Squared norms of the coordinates of each sample's product, (B,)."""
        basis = self.basis.to(d_BLO)
        pair = (d_BLO @ basis, a_BLI) if self.left else (d_BLO, a_BLI @ basis)
        within = Product("", (0, pair[0].shape[2]), *(t.unsqueeze(1) for t in pair))
        return within.inner(within)


@dataclass(frozen=True)
class OnEntries:
    """Projection on some entries; the others are zero.

    Attributes:
        places_K: their places in the flattened matrix, int64.
        shape: (O, I).
    """

    places_K: Tensor
    shape: tuple[int, int]

    def coordinates(self, matrix_OI: Tensor) -> Tensor:
        """Returns the entries, (K,)."""
        return matrix_OI.flatten()[self.places_K]

    def matrix(self, coordinates: Tensor) -> Tensor:
        """Returns the matrix with these entries, (O, I)."""
        outputs, inputs = self.shape
        whole = coordinates.new_zeros(outputs * inputs)
        whole[self.places_K] = coordinates
        return whole.view(outputs, inputs)

    def squared_norms(self, d_BLO: Tensor, a_BLI: Tensor) -> Tensor:
        """Squared norms of the entries of each sample's product, (B,).

        With one row per sample it is one product for all of them; with several the product of a
        sample at a time is formed.
        """
        if d_BLO.shape[1] == 1:
            chosen_OI = self.matrix(d_BLO.new_ones(len(self.places_K)))
            return ((d_BLO[:, 0].square() @ chosen_OI) * a_BLI[:, 0].square()).sum(dim=1)
        pairs = zip(d_BLO, a_BLI, strict=True)
        return torch.stack([self.coordinates(d.mT @ a).square().sum() for d, a in pairs])
