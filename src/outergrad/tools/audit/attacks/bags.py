"""Tokens that stood at each position of a batch of texts, from the gradients of two tables."""

from __future__ import annotations

import torch
from torch import Tensor

from outergrad.tools.audit.attacks.tokens import looked_up

_REWEIGHTINGS = 60
_SMOOTH = (1e-1, 1e-4)
"""Use that counts for as little as none, at first and at last."""
_SPREAD = 1e-10
"""Directions of less of the tokens' variance than this share of the largest say nothing."""
_RIDGE = 1e-9
_USED = 0.5
"""Share from which on a token is one of a sum's."""
_AGREEING = 1e-3
"""Relative error of a position's gradient, added up again, up to which its tokens are right."""
_MOST_TOKENS = 1200
"""Tokens of a batch up to which it is tried: the work grows with them, by position."""


def tokens_by_position(tokens_VW: Tensor, positions_PW: Tensor) -> list[Tensor]:
    """Returns the tokens that stood at each position, of all texts of the batch together.

    Tokens and positions are looked up in two tables and added, so that both get the same deltas: a
    position's gradient is the sum of those of the tokens that stood there. Where a token was used
    once, its own gradient is its delta. So a few of the tokens' gradients add up to that of a
    position, each once: the fewest are found by weighted least squares. A position is returned if
    its tokens add up to its gradient.

    It does not need fewer tokens than the model is wide. Choose it for batches that `text.py`
    cannot read, of models with learnt positions whose head does not share the table. Positions of
    tokens that a batch holds twice are not found. Our own; sources: Melis et al., arXiv 1805.04049
    (tokens in the table); Chartrand and Yin, ICASSP 2008 (the fewest by weights).

    Args:
        tokens_VW: Gradient of the table of tokens, (ids, width).
        positions_PW: Gradient of the table of positions, (positions, width).

    Returns:
        Ids at each position in ascending order; none where they do not add up.
    """
    none = torch.zeros(0, dtype=torch.int64)
    ids = looked_up(tokens_VW)
    if not 0 < len(ids) <= _MOST_TOKENS:
        return [none] * len(positions_PW)
    used_UW, sums_PW = tokens_VW[ids].double(), positions_PW.double()
    chosen_PU = _fewest(used_UW, sums_PW) > _USED
    errors_P = (chosen_PU.double() @ used_UW - sums_PW).norm(dim=1)
    fits_P = errors_P < _AGREEING * sums_PW.norm(dim=1)
    return [ids[one_U] if fits else none for one_U, fits in zip(chosen_PU, fits_P, strict=True)]


def _fewest(used_UW: Tensor, sums_PW: Tensor) -> Tensor:
    """Returns the share of each token in each position's sum, (positions, tokens)."""
    values_W, vectors_WW = torch.linalg.eigh(used_UW.T @ used_UW)
    # Deltas of one label point alike: with equal variance in all directions they tell apart.
    even_WW = vectors_WW * values_W.clamp(min=_SPREAD * values_W[-1]).rsqrt() * len(used_UW) ** 0.5
    parts_UE, sums_PE = used_UW @ even_WW, sums_PW @ even_WW
    ridge_EE = _RIDGE * len(used_UW) * torch.eye(parts_UE.shape[1], dtype=torch.float64)
    shares_PU = used_UW.new_full((len(sums_PW), len(used_UW)), 1 / len(used_UW))
    for step in range(_REWEIGHTINGS):
        smooth = _SMOOTH[0] * (_SMOOTH[1] / _SMOOTH[0]) ** (step / (_REWEIGHTINGS - 1))
        weights_PU = shares_PU.clamp(min=0.0) + smooth
        grams_PEE = torch.stack([(parts_UE.T * one_U) @ parts_UE for one_U in weights_PU])
        solved_PE, _ = torch.linalg.solve_ex(grams_PEE + ridge_EE, sums_PE)
        shares_PU = weights_PU * (solved_PE @ parts_UE.T)
    return shares_PU
