"""SPEAR: all rows of a small batch, from the first layer of a ReLU network."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ZERO = 1e-5
"""Entry of an image, as a share of the largest, that counts as zero."""
_NEARLY = 1e-3
"""The same before a direction is refined."""
_ROUNDING = 1e-6
_DEPENDENT = 1e-2
"""Part of a direction outside of others below which it is a combination of these."""
_AGREEING = 0.99
"""Share of units whose delta must be zero where the ReLU of the row is off, and nowhere else."""
_DRAWN = 4096
"""Submatrices that are solved together."""
_SAME = 1 - 1e-8
"""Cosine from which on two directions are one."""
_REFINED, _KEPT = 128, 1024


def spear(
    gradient_OI: Tensor,
    bias_gradient_O: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor,
    *,
    tries: int = 1 << 18,
    most_rows: int = 16,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns the rows of a batch that entered a linear layer with a ReLU behind it.

    `dW = Δᵀ A` has rank b for b rows. Of any factors `dW = L R` holds `Δᵀ = L Q` and `A = Q⁻¹ R`
    with an unknown Q, b x b. A ReLU makes about half of a row's deltas zero. So b - 1 units that
    are all off for one row give a matrix whose null vector is that row's column of Q: units are
    drawn until b columns are found that make L sparse. The bias gradient `Σ_n δ_n = L Q 1` gives
    their lengths. Some 2^(b-1) / b draws find a column, so that it ends at some 16 rows. A row is
    returned if the units that it turns on are those that have a delta.

    Choose it where fewer rows come back by `rows.py` than the batch has. Source: Dimitrov et al.,
    arXiv 2403.03945.

    Args:
        gradient_OI: Gradient of the weight, (outputs, inputs).
        bias_gradient_O: Gradient of the bias, (outputs,).
        weight_OI: The weight of the step.
        bias_O: Its bias.
        tries: Submatrices that are drawn at most.
        most_rows: Rank up to which it is tried.
        generator: Draws the units; PyTorch's own if None.

    Returns:
        Rows in float64, (found, inputs), found at most b.
    """
    left_OR, right_RI = _factors(gradient_OI.double())
    rank = left_OR.shape[1]
    best_NI = right_RI[:0]
    if not 0 < rank <= min(most_rows, len(left_OR) // 2):
        return best_NI
    for columns_RR in _sparse_columns(left_OR, tries, generator):
        bias_gradient_O1 = bias_gradient_O.double()[:, None]
        lengths_R = torch.linalg.lstsq(left_OR @ columns_RR, bias_gradient_O1).solution.flatten()
        q_RR = columns_RR * lengths_R
        rows_RI, bad = torch.linalg.solve_ex(q_RR, right_RI)
        if int(bad) == 0:
            active_RO = rows_RI @ weight_OI.double().T + bias_O.double() > 0
            fits_R = _agreement(active_RO, (left_OR @ q_RR).T) > _AGREEING
            if int(fits_R.sum()) > len(best_NI):
                best_NI = rows_RI[fits_R]
        if len(best_NI) == rank:
            break
    return best_NI


def _agreement(active_RO: Tensor, deltas_RO: Tensor) -> Tensor:
    """Returns the share of units that are on for a row just where they have a delta, (rows,)."""
    has_delta_RO = deltas_RO.abs() > _ZERO * deltas_RO.abs().amax(dim=1, keepdim=True)
    return (active_RO == has_delta_RO).double().mean(dim=1)


def _factors(gradient_OI: Tensor) -> tuple[Tensor, Tensor]:
    u_OR, values_R, v_RI = torch.linalg.svd(gradient_OI, full_matrices=False)
    rank = int((values_R > _ROUNDING * values_R[0]).sum()) if bool(values_R[0] > 0) else 0
    return u_OR[:, :rank], values_R[:rank, None] * v_RI[:rank]


def _sparse_columns(
    left_OR: Tensor, tries: int, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Yields sets of as many independent directions as the rank, each with a sparse image."""
    norms_O = left_OR.norm(dim=1)
    left_OR = left_OR[norms_O > _ZERO * norms_O.max()]  # units that are always off say nothing
    units, rank = left_OR.shape
    if rank == 1:
        yield left_OR.new_ones(1, 1)
        return
    # A wrong direction is zero at the rank - 1 units that it was made for, and nowhere else.
    enough = rank - 1 + max(units // 10, 2)
    found_KR, zeros_K = left_OR.new_zeros(0, rank), torch.zeros(0, dtype=torch.int64)
    for _ in range(0, tries, _DRAWN):
        draws_TR = torch.randint(units, (_DRAWN, rank - 1), generator=generator)
        candidates_TR = _null_vectors(left_OR[draws_TR])
        sparse_T = _zeros(candidates_TR, left_OR, _NEARLY).sum(dim=1) > enough
        if not bool(sparse_T.any()):
            continue
        refined_NR = _refined(candidates_TR[sparse_T][:_REFINED], left_OR)
        found_KR = torch.cat([found_KR, refined_NR])
        zeros_K = torch.cat([zeros_K, _zeros(refined_NR, left_OR, _ZERO).sum(dim=1)])
        sorted_K = zeros_K.argsort(descending=True, stable=True)
        sorted_K = sorted_K[_differs_from_those_before(found_KR[sorted_K])][:_KEPT]
        found_KR, zeros_K = found_KR[sorted_K], zeros_K[sorted_K]
        chosen_KR = _independent(found_KR)
        if len(chosen_KR) == rank:
            yield chosen_KR.T


def _zeros(directions_KR: Tensor, left_OR: Tensor, share: float) -> Tensor:
    """Returns where the images of directions are zero, bool, (directions, units)."""
    images_KO = (directions_KR @ left_OR.T).abs()
    return images_KO < share * images_KO.amax(dim=1, keepdim=True)


def _refined(directions_KR: Tensor, left_OR: Tensor) -> Tensor:
    """Returns each direction anew, from all units at which it is nearly zero: less rounding."""
    for share in (_NEARLY, _ZERO):
        zeros_KO = _zeros(directions_KR, left_OR, share)
        directions_KR = torch.stack([_flattest(left_OR[zero_O]) for zero_O in zeros_KO])
    return directions_KR


def _flattest(rows_OR: Tensor) -> Tensor:
    """Returns the direction in which rows are the shortest; needs as many rows as columns."""
    if len(rows_OR) < rows_OR.shape[1]:
        return torch.full_like(rows_OR[:1].sum(dim=0), torch.nan)
    return torch.linalg.svd(rows_OR, full_matrices=False).Vh[-1]


def _differs_from_those_before(directions_KR: Tensor) -> Tensor:
    """Returns which directions are no other one once more, bool, (directions,)."""
    same_KK = (directions_KR @ directions_KR.T).abs() > _SAME
    return ~same_KK.tril(diagonal=-1).any(dim=1)


def _null_vectors(matrices_TQR: Tensor) -> Tensor:
    """Returns a null vector of length 1 of each matrix, (matrices, R); of NaN if there are more."""
    square, last = matrices_TQR[:, :, :-1], matrices_TQR[:, :, -1:]
    solved, _ = torch.linalg.solve_ex(square, -last)
    found_TR = torch.cat([solved.squeeze(-1), torch.ones_like(solved[:, :1, 0])], dim=1)
    return found_TR / found_TR.norm(dim=1, keepdim=True)


def _independent(sorted_KR: Tensor) -> Tensor:
    """Returns the first directions of which none is a combination of those before it."""
    rank = sorted_KR.shape[1]
    chosen, basis_KR = list[Tensor](), sorted_KR.new_zeros(0, rank)
    for direction_R in sorted_KR:
        rest_R = direction_R - (basis_KR @ direction_R) @ basis_KR
        if float(rest_R.norm()) > _DEPENDENT:
            chosen.append(direction_R)
            basis_KR = torch.cat([basis_KR, rest_R[None] / rest_R.norm()])
        if len(chosen) == rank:
            break
    return torch.stack(chosen) if chosen else basis_KR
