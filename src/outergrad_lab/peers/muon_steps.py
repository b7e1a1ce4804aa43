"""Steps of Muon, and the weights that they are for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of Newton-Schulz: a X + b (X Xᵀ) X + c (X Xᵀ)² X, five times."""

SIZE = 0.2
"""Root mean square of a step at a learning rate of 1, about that of Adam's steps."""


def orthonormal(matrix: Tensor) -> Tensor:
    """Returns about U Vᵀ of a matrix U Σ Vᵀ, by five steps of Newton-Schulz in float32 or more."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide.to(torch.promote_types(wide.dtype, torch.float32))
    x = x / x.norm().clamp_min(torch.finfo(x.dtype).tiny)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide is matrix else x.T).to(matrix.dtype)


def muon_scale(shape: torch.Size) -> float:
    """Returns 0.2 √max(O, I), with which steps have the size of Adam's and take its rates."""
    return SIZE * max(shape[0], shape[1:].numel()) ** 0.5


def muon_step(direction: Tensor) -> Tensor:
    """Returns the step of a weight at a learning rate of 1; a kernel has a row per output."""
    step = orthonormal(direction.flatten(1)).view(direction.shape)
    return muon_scale(direction.shape) * step


def hidden_weights(model: nn.Module, *, kernels: bool = True) -> list[str]:
    """Returns the names of trained matrices, and of kernels of convolutions.

    Embeddings and the head, which is the last linear layer, are left out.
    """
    aside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    aside |= {id(m.weight) for m in linear[-1:]}
    kept = {id(m.weight) for m in model.modules() if isinstance(m, _ConvNd) and kernels}
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return [n for n, p in trained if (p.dim() == 2 and id(p) not in aside) or id(p) in kept]


def wide(weight: Tensor) -> Tensor:
    """Returns a view of a weight as a matrix of no more rows than columns."""
    matrix = weight.view(len(weight), -1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
