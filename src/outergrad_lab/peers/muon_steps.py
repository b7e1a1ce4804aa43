"""Steps of Muon, and the weights that they are for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outergrad.optim import muon_groups, newton_schulz


def muon_scale(shape: torch.Size) -> float:
    """Returns 0.2 √max(O, I), with which steps have the size of Adam's and take its rates."""
    return 0.2 * max(shape[0], shape[1:].numel()) ** 0.5


def muon_step(direction: Tensor) -> Tensor:
    """Returns the step of a weight at a learning rate of 1; a kernel has a row per output."""
    step = newton_schulz(direction.flatten(1)).view(direction.shape)
    return muon_scale(direction.shape) * step


def hidden_weights(model: nn.Module) -> list[str]:
    """Returns the names of the matrices and kernels that `outergrad.optim.Muon` would move so.

    Embeddings, the head (the last linear layer) and the first convolution are none.
    """
    groups = (group for group in muon_groups(model) if group["matrices"])
    return [name for group in groups if not group.get("stacked") for name, _ in group["params"]]


def wide(weight: Tensor) -> Tensor:
    """Returns a view of a weight as a matrix of no more rows than columns."""
    matrix = weight.view(len(weight), -1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
