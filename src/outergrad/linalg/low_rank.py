"""Result of every solver: a truncated singular value decomposition with its rank and its error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outergrad.core.types import Factors

_NOISE = 32
"""Number of roundings of the largest singular value below which others count as zero.
Products of up to some ten thousand terms leave 2 to 10 roundings in the place of a zero."""


@dataclass(frozen=True)
class LowRank:
    """The leading singular triplets of a weight gradient, `dW_GOI ~= d_GROᵀ a_GRI`.

    All groups have the same number of rows, R, because they are sent in one tensor.

    Attributes:
        d_GRO: left singular vectors times singular values, float32 or float64.
        a_GRI: right singular vectors, orthonormal rows; `a_GRI.mT` is a warm start for
            `subspace_iteration`.
        sigma_GR: singular values, falling, float64.
        discarded_G: squared Frobenius norm of the discarded part, float64, in squares of `unit`.
            None where no tolerance was given and it would have cost extra work.
        unit: 1; for float64 numbers whose squares are out of range, about the largest of them.
    """

    d_GRO: Tensor
    a_GRI: Tensor
    sigma_GR: Tensor
    discarded_G: Tensor | None
    unit: float = 1.0

    @property
    def rank(self) -> int:
        """Number of triplets, R."""
        return self.sigma_GR.shape[1]

    @property
    def energy(self) -> Tensor | None:
        """Squared Frobenius norm of the gradient, (G,), in squares of `unit`; None if unknown."""
        if self.discarded_G is None:
            return None
        return (self.sigma_GR / self.unit).square().sum(dim=1) + self.discarded_G

    @property
    def relative_error(self) -> float | None:
        """Frobenius norm of the discarded part, relative to the whole; 0 for a zero gradient."""
        if self.discarded_G is None or self.energy is None:
            return None
        energy = self.energy.sum()
        return (self.discarded_G.sum() / torch.where(energy == 0, 1.0, energy)).sqrt().item()

    def rank_within(self, tolerance: float) -> int:
        """Returns the smallest rank with a relative error of at most the tolerance, at most R.

        Args:
            tolerance: in [0, 1); `discarded_G` must be known.
        """
        assert self.discarded_G is not None
        discarded_K = _discarded(self.sigma_GR / self.unit, self.discarded_G).sum(dim=0)
        return min(self.rank, _rank_within(tolerance, discarded_K))

    def leading(self, rank: int) -> LowRank:
        """Returns the first `rank` triplets, or all of them if there are no more."""
        rest_GR = self.sigma_GR[:, rank:]
        discarded_G = self.discarded_G
        if discarded_G is not None:
            discarded_G = discarded_G + (rest_GR / self.unit).square().sum(dim=1)
        kept = self.d_GRO[:, :rank], self.a_GRI[:, :rank], self.sigma_GR[:, :rank]
        return LowRank(*kept, discarded_G, self.unit)

    def rest(self, rank: int) -> LowRank:
        """Returns the triplets behind the first `rank`."""
        others = self.d_GRO[:, rank:], self.a_GRI[:, rank:], self.sigma_GR[:, rank:]
        return LowRank(*others, self.discarded_G, self.unit)

    def factors(self, rows: int | None = None, b_GO: Tensor | None = None) -> Factors:
        """Returns the triplets as rows for the wire, padded with rows of zeros up to `rows`.

        Args:
            rows: R or more, None for R.
            b_GO: the bias gradient, if the layer has one; it is not contained in the rows.
        """
        if rows is None or rows == self.rank:
            return Factors(self.d_GRO, self.a_GRI, b_GO)
        missing = (0, 0, 0, rows - self.rank)
        return Factors(pad(self.d_GRO, missing), pad(self.a_GRI, missing), b_GO)


def truncate(
    u_GOK: Tensor,
    sigma_GK: Tensor,
    v_GIK: Tensor,
    scale_G: Tensor,
    rest_G: Tensor | None,
    rank: int,
    tolerance: float,
    unit: float = 1.0,
) -> LowRank:
    """Keeps the smallest number of triplets, at most rank, that meets the tolerance.

    Args:
        u_GOK: left singular vectors.
        sigma_GK: singular values without the scale, falling.
        v_GIK: right singular vectors.
        scale_G: factor of the singular values; NaN makes the whole group NaN.
        rest_G: squared norm of the part outside the K triplets, with the scale, in squares of the
            unit; None if unknown.
        rank: largest R.
        tolerance: largest relative Frobenius error, of all groups together.
        unit: as in `LowRank`.
    """
    keep = min(rank, _numerical_rank(sigma_GK))
    sigma_GK = sigma_GK.double() * scale_G[:, None]
    discarded_GK = None if rest_G is None else _discarded(sigma_GK / unit, rest_G)
    if discarded_GK is not None:
        keep = min(keep, _rank_within(tolerance, discarded_GK.sum(dim=0)))
    keep = max(keep, int(scale_G.isnan().any()))  # NaN must not be cut off
    sigma_GR = sigma_GK[:, :keep]
    return LowRank(
        d_GRO=_times(u_GOK[..., :keep], sigma_GR).mT,
        a_GRI=v_GIK[..., :keep].mT,
        sigma_GR=sigma_GR,
        discarded_G=None if discarded_GK is None else discarded_GK[:, keep],
        unit=unit,
    )


def _times(u_GOR: Tensor, sigma_GR: Tensor) -> Tensor:
    """`u sigma`, in float64 where singular values are out of float32's range: u may be tiny."""
    finfo = torch.finfo(torch.float32)
    if bool(((sigma_GR > finfo.tiny) & (sigma_GR < finfo.max)).all()):
        return u_GOR * sigma_GR[:, None].to(u_GOR.dtype)
    return (u_GOR * sigma_GR[:, None]).to(u_GOR.dtype)


def is_noise(sigma: Tensor, largest: Tensor) -> Tensor:
    """True for singular values that are nothing but rounding."""
    return sigma <= _NOISE * torch.finfo(sigma.dtype).eps * largest


def _numerical_rank(sigma_GK: Tensor) -> int:
    """The number of singular values above the noise, in the group that has most."""
    return int((~is_noise(sigma_GK, sigma_GK[:, :1])).any(dim=0).sum())


def _discarded(sigma_GK: Tensor, rest_G: Tensor) -> Tensor:
    """The energy discarded by keeping 0, 1, ... K triplets, (G, K + 1).

    Small terms are added first: a difference from the whole could not tell an error below the
    square root of the precision from zero.
    """
    terms_GK = torch.cat([sigma_GK.square(), rest_G[:, None]], dim=1)
    return terms_GK.flip(1).cumsum(dim=1).flip(1)


def _rank_within(tolerance: float, discarded_K: Tensor) -> int:
    """The first rank whose discarded energy is within the tolerance."""
    return int((discarded_K > tolerance**2 * discarded_K[0]).sum())
