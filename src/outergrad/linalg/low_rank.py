"""Result of every solver: a truncated singular value decomposition with its rank and its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outergrad.core.types import Factors, Gradient
from outergrad.linalg.outer import stack, widened
from outergrad.linalg.product import Product, product

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


def small_core(gradient: Gradient, rank: int, tolerance: float = 0.0) -> LowRank:
    """Computes the best approximation of `dᵀ a` of at most the given rank (Eckart and Young).

    With thin QR factorisations `dᵀ = Q_d R_d` and `aᵀ = Q_a R_a` the gradient is
    `Q_d (R_d R_aᵀ) Q_aᵀ`, so that the decomposition of the N x N core is that of the gradient
    (Bebendorf, Hierarchical Matrices, 2008, chapter 1). A factor with more rows than columns
    is used unchanged: the core is never larger than N, I or O.

    Args:
        gradient: d_GNO and a_GNI, or the gradient itself, any floating dtype.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
    """
    matrix = product(gradient)
    q_d_GOK, core_GKL, q_a_GIL = core(matrix)
    u_GKM, sigma_GM, vt_GML = torch.linalg.svd(core_GKL, full_matrices=False)
    nothing_G = torch.zeros_like(matrix.scale_G)
    return truncate(
        _lift(q_d_GOK, u_GKM[..., :rank]),
        sigma_GM,
        _lift(q_a_GIL, vt_GML.mT[..., :rank]),
        matrix.scale_G,
        nothing_G,
        rank,
        tolerance,
        matrix.unit,
    )


def merge(
    parts: Sequence[Factors],
    rank: int,
    tolerance: float = 0.0,
    *,
    weights: Sequence[float] | None = None,
) -> LowRank:
    """Computes the best approximation, of at most the given rank, of a weighted sum of gradients.

    The sum has the stacked rows as factors, few enough for an exact decomposition through a
    small core (Bebendorf, Hierarchical Matrices, 2008, chapter 1). In a tree of merges the
    `relative_error` of each node is its own, relative to its own sum.

    Args:
        parts: d_GRO and a_GRI of each site; their ranks may differ.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
        weights: one per part; None for the mean. In a tree they are the share of sites below.
    """
    if weights is None:
        weights = [1 / len(parts)] * len(parts)
    weighted = [_weighted(part, weight) for part, weight in zip(parts, weights, strict=True)]
    return small_core(stack(weighted), rank, tolerance)


def _weighted(part: Factors, weight: float) -> Factors:
    """In float32 at least: a weight in half precision would cost three digits."""
    return Factors(widened(part.d_GRO) * weight, part.a_GRI)


def core(gradient: Product) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Returns `q_d, core, q_a` with `q_d core q_aᵀ` the gradient; None stands for the identity."""
    if gradient.d_GNO is None:
        return None, gradient.a_GNI, None
    q_d_GOK, r_GKN = _thin_qr(gradient.d_GNO.mT)
    q_a_GIL, r_GLN = _thin_qr(gradient.a_GNI.mT)
    return q_d_GOK, r_GKN @ r_GLN.mT, q_a_GIL


def _thin_qr(x_GWN: Tensor) -> tuple[Tensor | None, Tensor]:
    """`q, r` with `x = q r` and orthonormal columns of q; None for q where it would not be thin."""
    if x_GWN.shape[1] <= x_GWN.shape[2]:
        return None, x_GWN
    return torch.linalg.qr(x_GWN)


def _lift(q_GWK: Tensor | None, x_GKR: Tensor) -> Tensor:
    return x_GKR if q_GWK is None else q_GWK @ x_GKR
