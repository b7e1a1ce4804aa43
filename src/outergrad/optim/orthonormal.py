"""The Newton-Schulz iteration, which brings all singular values of a matrix close to 1."""

from __future__ import annotations

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, (X Xᴴ) X and (X Xᴴ)² X, the same in each iteration (Jordan et al.)."""
STEPS = 5


def newton_schulz(matrix: Tensor, steps: int = STEPS, dtype: torch.dtype | None = None) -> Tensor:
    """Returns U Vᴴ of a matrix's singular value decomposition U S Vᴴ, approximately.

    After five steps, singular values of at least 0.003 of the Frobenius norm lie between 0.68
    and 1.2. Smaller ones are raised by a factor of 485 at most, and zeros remain zeros.

    Source: Jordan et al., Muon, kellerjordan.github.io/posts/muon.

    Args:
        matrix: A matrix (..., O, I), real or complex; leading dimensions are a batch.
        steps: Number of iterations.
        dtype: Type in which it is computed; by default bfloat16 on a GPU, and float32 or the
            matrix's own, whichever is wider, on a CPU.

    Returns:
        A matrix (..., O, I) in the type of the input.
    """
    dtype = dtype or _computed_in(matrix)
    x = matrix.to(dtype).flatten(0, -3) if matrix.dim() > 2 else matrix.to(dtype).unsqueeze(0)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mH
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    if 2 * x.shape[-2] <= x.shape[-1] and torch.finfo(dtype).bits > 16:
        x = _of_gram(x @ x.mH, steps) @ x
    else:
        x = _iterated(x, steps)
    return (x if wide else x.mH).reshape(matrix.shape).to(matrix.dtype)


def _iterated(x: Tensor, steps: int) -> Tensor:
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = x @ x.mH
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _of_gram(gram: Tensor, steps: int) -> Tensor:
    """Returns Q, by which all iterations together multiply X, from X Xᴴ.

    Products of two small squares take the place of those with X: 44% fewer multiplications where a
    matrix is four times as long as it is wide (Dao-AILab, Gram-Newton-Schulz). Small singular
    values are squared, for which 16 bits are too coarse.
    """
    a, b, c = QUINTIC
    whole = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    for _ in range(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        whole = factor @ whole
        gram = factor @ gram @ factor
    return whole


def _computed_in(matrix: Tensor) -> torch.dtype:
    """Products of bfloat16 are fast on GPUs alone, and have no complex counterpart."""
    if matrix.is_cuda and not matrix.is_complex():
        return torch.bfloat16
    return torch.promote_types(matrix.dtype, torch.float32)
