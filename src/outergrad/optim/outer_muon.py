"""Outer optimizer of `og.LocalSteps` under Muon: mean changes of matrices are made orthonormal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from outergrad.optim.groups import begin_step, check_last, check_ranges
from outergrad.optim.orthonormal import STEPS, newton_schulz

_ITERATIONS = 12


class OuterMuon(Optimizer):
    """Moves matrices by their mean change, made orthonormal, as far as its largest singular value.

    For a matrix θ (O, I) with the mean change G over the sites, old weights minus new:

        θ ← θ - η σ(G) newton_schulz(G)      where σ(G) is the largest singular value of G

    Each site's Muon makes its own changes orthonormal. Their mean is shorter in all directions in
    which the sites differ, and what few bits add to it is noise in all directions. Made orthonormal
    once more it has the same length in all of them, as the update of one Muon over all sites. So
    what a site has not sent need not be remembered: choose it with the signs of whole matrices,
    which take turns, without error feedback (docs/fewest-bytes.md, "Orthonormal once more"):

        few = og.Sparse(
            density=1.0, select="random_blocks", block=256, wire=og.wire.Sign(),
            vectors=og.wire.Int4(), error_feedback=False,
        )
        steps = og.LocalSteps(6, stream=6, outer=og.optim.OuterMuon, method=few)

    Parameters of two dimensions or more are matrices, O × all others: embeddings and the head, too,
    kernels of convolutions, and a stack of matrices as one. All others become their mean over the
    sites. It has no state. With weight decay of the inner optimizer the decay is part of the
    change.

    Source: the iteration of Jordan et al., Muon, kellerjordan.github.io/posts/muon. To make the
    mean orthonormal again is ours.

    Args:
        params: Weights that all sites had after the last exchange.
        lr: η. Signs of normally distributed numbers keep 2/π of these, so the default is about π/2.
            Use 1 where changes travel exactly.
        steps: Newton-Schulz iterations.

    Raises:
        ValueError: A value is out of range.
    """

    needs_matrices = True
    """Shards of a matrix cannot be made orthonormal each by itself."""

    def __init__(self, params: Any, lr: float = 1.6, *, steps: int = STEPS) -> None:
        super().__init__(params, {"lr": lr, "steps": steps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, after checking its values."""
        super().add_param_group(param_group)
        check_last(self, _check)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # PyTorch says None or float
        """Moves the parameters that have a change."""
        loss = begin_step(self, closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _move(p, p.grad, group["lr"], group["steps"])
        return loss


def _move(p: Tensor, change: Tensor, lr: float, steps: int) -> None:
    if p.dim() < 2 or not p.numel():
        p.sub_(change)
        return
    matrix = change.flatten(1)
    length = largest_singular_value(matrix)
    p.sub_((lr * length * newton_schulz(matrix, steps)).view(p.shape).to(p.dtype))


def largest_singular_value(matrix: Tensor) -> Tensor:
    """Returns the largest singular value of a matrix (O, I), a real scalar (), by power iterations.

    It is at most the true one, and seldom less by more than a few percent: they begin with the
    longest row.
    """
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    direction = x[x.abs().square().sum(dim=1).argmax()].conj()
    tiny = torch.finfo(x.dtype).tiny
    length = torch.linalg.vector_norm(direction)
    for _ in range(_ITERATIONS):
        image = x @ (direction / length.clamp_min(tiny))
        length_of_image = torch.linalg.vector_norm(image)
        direction = x.mH @ (image / length_of_image.clamp_min(tiny))
        length = torch.linalg.vector_norm(direction)
    return length


def _check(group: Mapping[str, Any]) -> None:
    ranges = {
        "lr": (group["lr"] > 0, "more than 0"),
        "steps": (group["steps"] >= 1, "1 or more"),
    }
    check_ranges("OuterMuon", group, ranges)
