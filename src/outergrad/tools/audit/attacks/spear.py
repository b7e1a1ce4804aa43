"""SPEAR: all rows of a batch, from the first layer of a ReLU network."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ZEROS = (1e-2, 1e-3, 1e-5)
"""Entries of an image, as shares of the largest, that count as zero: in few bits, in the rounding
of weights, and in a gradient of 32 bits."""
_DEPENDENT = 1e-2
"""Part of a direction outside of others below which it is a combination of these."""
_AGREEING = 0.97
"""Share of units whose delta must be zero where the ReLU of the row is off, and nowhere else."""
_ALIKE, _SAME = 1 - 1e-4, 1 - 1e-6
"""Cosines from which on two directions are one, before and behind refinement."""
_SPARSE = (0.65, 0.45, 0.0)
"""Shares of the most zeros that a direction must have, by turns. A difference of two rows of one
label has half of them. Of few units a row may have as few: then all rows must fit."""
_KEPT = 1024
_REFINEMENTS = 2
_REWEIGHTINGS = 100
_SMOOTH = (1.0, 1e-3)
"""Part of an image's mean size below which its entries are alike, at first and at last."""
_STARTS = 128
"""Directions that are sharpened together."""
_MOST_DRAWN = 16
"""Rows up to which zeros are drawn, too."""
_DRAWN, _DRAWS, _REFINED = 4096, 8, 16
"""Draws that are solved together; how often, in a round; and how many of each are looked at."""
_IDLE_ROUNDS = 2
"""Rounds without a new direction after which the search ends."""


def spear(
    gradient_OI: Tensor,
    bias_gradient_O: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor,
    *,
    rounds: int = 12,
    most_rows: int = 64,
    rounding: float = 1e-6,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns the rows of a batch that entered a linear layer with a ReLU behind it.

    `dW = Δᵀ A` has rank b for b rows. Of any factors `dW = L R` holds `Δᵀ = L Q` and `A = Q⁻¹ R`
    with an unknown Q, b x b. A ReLU makes about half of a row's deltas zero, so that the columns
    of Q are the directions q whose images `L q` are sparse. They are found one by one as local
    minima of `‖L q‖₁`, from starts at rows of L, by weights 1 / |L q| in a sum of squares. The bias
    gradient `Σ_n δ_n = L Q 1` gives their lengths. A row is returned if the units that it turns on
    are those that have a delta.

    Choose it where fewer rows come back by `rows.py` than the batch has. It needs some twenty
    units per row. Sources: Dimitrov et al., arXiv 2403.03945 (the factors, and the check);
    Bakarsky et al., arXiv 2510.24200 (as a search for a sparse dictionary); Chartrand and Yin,
    ICASSP 2008 (minima by weights).

    Args:
        gradient_OI: Gradient of the weight, (outputs, inputs).
        bias_gradient_O: Gradient of the bias, (outputs,).
        weight_OI: The weight of the step.
        bias_O: Its bias.
        rounds: Rounds of 128 starts at most; of 64 rows each takes some seconds.
        most_rows: Rank up to which it is tried.
        rounding: Singular values below this share of the largest are rounding.
        generator: Draws the starts; PyTorch's own if None.

    Returns:
        Rows in float64, (found, inputs), found at most b.
    """
    left_OR, right_RI = _factors(gradient_OI.double(), rounding)
    rank = left_OR.shape[1]
    best_NI = right_RI[:0]
    if not 0 < rank <= min(most_rows, len(left_OR) // 2):
        return best_NI
    for columns_RR, share in _sparse_columns(left_OR, rounds, generator):
        bias_gradient_O1 = bias_gradient_O.double()[:, None]
        lengths_R = torch.linalg.lstsq(left_OR @ columns_RR, bias_gradient_O1).solution.flatten()
        q_RR = columns_RR * lengths_R
        rows_RI, bad = torch.linalg.solve_ex(q_RR, right_RI)
        if int(bad) == 0:
            active_RO = rows_RI @ weight_OI.double().T + bias_O.double() > 0
            fits_R = _agreement(active_RO, (left_OR @ q_RR).T) > _AGREEING
            counts = share == _SPARSE[0] or bool(fits_R.all())
            if counts and int(fits_R.sum()) > len(best_NI):
                best_NI = rows_RI[fits_R]
        if len(best_NI) == rank:
            break
    return best_NI


def _agreement(active_RO: Tensor, deltas_RO: Tensor) -> Tensor:
    """Returns the share of units that are on for a row just where they have a delta, (rows,)."""
    sizes_RO = deltas_RO.abs() / deltas_RO.abs().amax(dim=1, keepdim=True)
    agreements = [(active_RO == (sizes_RO > zero)).double().mean(dim=1) for zero in _ZEROS]
    return torch.stack(agreements).amax(dim=0)


def _factors(gradient_OI: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    u_OR, values_R, v_RI = torch.linalg.svd(gradient_OI, full_matrices=False)
    rank = int((values_R > rounding * values_R[0]).sum()) if bool(values_R[0] > 0) else 0
    return u_OR[:, :rank], values_R[:rank, None] * v_RI[:rank]


def _sparse_columns(
    left_OR: Tensor, rounds: int, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, float]]:
    """Yields sets of as many independent directions as the rank, each with a sparse image.

    The share of `_SPARSE` that each has stands beside the set.
    """
    norms_O = left_OR.norm(dim=1)
    left_OR = left_OR[norms_O > _ZEROS[-1] * norms_O.max()]  # units always off say nothing
    units, rank = left_OR.shape
    if rank == 1:
        yield left_OR.new_ones(1, 1), _SPARSE[0]
        return
    found_KR, before = left_OR.new_zeros(0, rank), left_OR.new_zeros(0, rank)
    idle = 0
    for number in range(rounds):
        starts_TR = left_OR[torch.randint(units, (_STARTS,), generator=generator)]
        if number % 2 == 0:  # else anew, as what was found may be wrong
            starts_TR = _outside(starts_TR, before)
        tried_TR = _sharpened(starts_TR, left_OR)
        if number % 2 == 1 and rank <= _MOST_DRAWN:
            tried_TR = torch.cat([tried_TR, _drawn(left_OR, generator)])
        sharp_TR = _refined(tried_TR, left_OR)
        found_KR = _distinct(torch.cat([found_KR, sharp_TR]), left_OR, _SAME)
        sets = [_independent(_sparsest(found_KR, left_OR, share)) for share in _SPARSE]
        for chosen_KR, share in zip(sets, _SPARSE, strict=True):
            if len(chosen_KR) == rank:
                yield chosen_KR.T, share
        chosen_KR = sets[0]
        same = chosen_KR.shape == before.shape and bool(torch.allclose(chosen_KR, before))
        idle = idle + 1 if same else 0
        if idle == _IDLE_ROUNDS:
            return
        before = chosen_KR


def _outside(starts_TR: Tensor, found_KR: Tensor) -> Tensor:
    """Returns the parts of starts outside of what was found."""
    basis_RK = torch.linalg.qr(found_KR.T).Q
    rest_TR = starts_TR - starts_TR @ basis_RK @ basis_RK.T
    return rest_TR / rest_TR.norm(dim=1, keepdim=True).clamp(min=1e-12)


def _drawn(left_OR: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns directions of sparse images that are zero at rank - 1 units, drawn at random.

    Units that are all off for one row give its direction, of which some one in 2^(b-1) / b draws
    has so many. It finds the rows of which `_sharpened` falls down to others.
    """
    units, rank = left_OR.shape
    found = [left_OR[:0]]
    for _ in range(_DRAWS):
        drawn_TQ = torch.randint(units, (_DRAWN, rank - 1), generator=generator)
        square_TQQ, last_TQ1 = left_OR[drawn_TQ].split([rank - 1, 1], dim=2)
        solved_TQ1, _ = torch.linalg.solve_ex(square_TQQ, -last_TQ1)
        ones_T1 = torch.ones_like(solved_TQ1[:, :1, 0])
        directions_TR = torch.cat([solved_TQ1.squeeze(2), ones_T1], dim=1)
        directions_TR = directions_TR / directions_TR.norm(dim=1, keepdim=True)
        sparse_T = _zeros(directions_TR, left_OR, _ZEROS[1]).sum(dim=1) > _enough(left_OR)
        found.append(directions_TR[sparse_T][:_REFINED])
    return torch.cat(found)


def _sharpened(directions_TR: Tensor, left_OR: Tensor) -> Tensor:
    """Returns local minima of `‖L q‖₁` over directions q, each near one of those given.

    Each step solves a least squares with the weights of the step before. In 32 bits, which are
    twice as fast: what follows refines.
    """
    rank = left_OR.shape[1]
    down, across = torch.tril_indices(rank, rank)
    left_OR = left_OR.float()
    products_OH = left_OR[:, down] * left_OR[:, across]  # half of each outer product
    directions_TR = directions_TR.float()
    grams_TRR = directions_TR.new_zeros(len(directions_TR), rank, rank)
    for step in range(_REWEIGHTINGS):
        smooth = _SMOOTH[0] * (_SMOOTH[1] / _SMOOTH[0]) ** (step / (_REWEIGHTINGS - 1))
        images_TO = directions_TR @ left_OR.T
        least_T1 = smooth * images_TO.abs().mean(dim=1, keepdim=True)
        weights_TO = least_T1 / (images_TO.square() + least_T1.square()).sqrt()
        halves_TH = weights_TO @ products_OH
        grams_TRR[:, down, across] = halves_TH
        grams_TRR[:, across, down] = halves_TH
        solved_TR, _ = torch.linalg.solve_ex(grams_TRR, directions_TR)
        directions_TR = solved_TR / solved_TR.norm(dim=1, keepdim=True)
    return directions_TR.double()


def _enough(left_OR: Tensor) -> int:
    """Returns how many zeros an image must have.

    A wrong direction can be zero at rank - 1 units, and is nearly so at one in forty of the others.
    """
    units, rank = left_OR.shape
    return rank - 1 + max(units // 10, 2)


def _zeros(directions_KR: Tensor, left_OR: Tensor, share: float) -> Tensor:
    """Returns where the images of directions are zero, bool, (directions, units)."""
    images_KO = (directions_KR @ left_OR.T).abs()
    return images_KO < share * images_KO.amax(dim=1, keepdim=True)


def _refined(directions_KR: Tensor, left_OR: Tensor) -> Tensor:
    """Returns those of directions whose images are sparse, each anew from its zeros alone."""
    sparse_K = _zeros(directions_KR, left_OR, _ZEROS[0]).sum(dim=1) > _enough(left_OR)
    refined_KR = _distinct(directions_KR[sparse_K], left_OR, _ALIKE)
    for _ in range(_REFINEMENTS):
        flatter = [_flatter(one_R, left_OR) for one_R in refined_KR]
        refined_KR = torch.stack(flatter) if flatter else refined_KR
    return refined_KR


def _flatter(direction_R: Tensor, left_OR: Tensor) -> Tensor:
    """Returns the one of most zeros among a direction and those that its zeros make."""
    zeros_SO = torch.stack([_zeros(direction_R[None], left_OR, share)[0] for share in _ZEROS])
    tried_KR = torch.stack(
        [direction_R]
        + [_flattest(left_OR[zero_O]) for zero_O in zeros_SO if zero_O.sum() > _enough(left_OR)]
    )
    return tried_KR[_zero_totals(tried_KR, left_OR).argmax()]


def _zero_totals(directions_KR: Tensor, left_OR: Tensor) -> Tensor:
    """Returns the zeros of each image, counted at each share, so that exact ones count more."""
    return torch.stack([_zeros(directions_KR, left_OR, s).sum(dim=1) for s in _ZEROS]).sum(dim=0)


def _flattest(rows_OR: Tensor) -> Tensor:
    """Returns the direction in which rows are the shortest; needs as many rows as columns."""
    return torch.linalg.eigh(rows_OR.T @ rows_OR).eigenvectors[:, 0]


def _distinct(directions_KR: Tensor, left_OR: Tensor, cosine: float) -> Tensor:
    """Returns directions that are no other one once more, those of most zeros first.

    A difference of two rows of one label is zero where both are off, and nearly so where both are
    on: it has half of the zeros that a row has.
    """
    zeros_K = _zero_totals(directions_KR, left_OR)
    sorted_KR = directions_KR[zeros_K.argsort(descending=True, stable=True)]
    same_KK = (sorted_KR @ sorted_KR.T).abs() > cosine
    return sorted_KR[~same_KK.tril(diagonal=-1).any(dim=1)][:_KEPT]


def _sparsest(sorted_KR: Tensor, left_OR: Tensor, share: float) -> Tensor:
    """Returns the directions that have at least this share of the zeros of the first."""
    zeros_K = _zero_totals(sorted_KR, left_OR)
    return sorted_KR[zeros_K > share * zeros_K[:1]]


def _independent(sorted_KR: Tensor) -> Tensor:
    """Returns the first directions of which none is a combination of those before it."""
    rank = sorted_KR.shape[1]
    chosen, basis_KR = list[Tensor](), sorted_KR.new_zeros(0, rank)
    for direction_R in sorted_KR:
        rest_R = direction_R - (basis_KR @ direction_R) @ basis_KR
        if float(rest_R.norm()) > _DEPENDENT and len(chosen) < rank:
            chosen.append(direction_R)
            basis_KR = torch.cat([basis_KR, rest_R[None] / rest_R.norm()])
    return torch.stack(chosen) if chosen else basis_KR
