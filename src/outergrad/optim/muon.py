"""Muon: orthonormal updates for matrices, and Adam for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from outergrad.optim.adam import move_by_adam
from outergrad.optim.groups import begin_step, called, check_last, check_ranges, gradient
from outergrad.optim.matrices import as_matrices, of_one_shape
from outergrad.optim.orthonormal import STEPS, newton_schulz


class Muon(Optimizer):
    """Moves matrices by orthonormal updates, and all other parameters by Adam.

    For a matrix θ (O, I) with gradient G:

        M ← μ M + (1 - μ) G
        U ← newton_schulz(μ M + (1 - μ) G)      of M itself without `nesterov`
        θ ← (1 - η λ) θ - 0.2 √max(O, I) η U

    The factor 0.2 √max(O, I) gives a matrix the root mean square update of Adam, so that one
    learning rate η serves both. Kernels of convolutions are matrices O × (I · height · width).

    Choose it for hidden matrices; embeddings and the head learn better by Adam. `muon_groups`
    tells them apart:

        optimizer = outergrad.optim.Muon(muon_groups(model), lr=4e-3)

    Among several sites gradients of low rank lose less under it than under Adam
    (docs/fewest-bytes.md). `torch.optim.Muon` takes matrices alone and computes in bfloat16, which
    is slow on most CPUs.

    Source: Jordan et al., Muon, kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982,
    for the factor.

    Args:
        params: Parameters, named parameters or groups. A group may say its rule: with
            ``matrices=True`` all are moved by orthonormal updates, with False all by Adam, with
            None those of two dimensions or more by orthonormal updates. With ``stacked=True`` the
            last two dimensions of a parameter are matrices, as in mixtures of experts.
        lr: Learning rate η.
        momentum: μ.
        nesterov: Whether this step's gradient counts twice, as in Nesterov's momentum.
        steps: Newton-Schulz iterations.
        betas: Decays of Adam's two means.
        eps: Adam's smallest denominator.
        weight_decay: λ, decoupled, for all parameters.
        dtype: Type in which the iteration is computed. By default bfloat16 on a GPU, and float32 or
            a parameter's own on a CPU. There bfloat16 is faster if it has units for it
            (AVX512-BF16, AMX), and far slower if not.

    Raises:
        ValueError: A value is out of range, or ``matrices=True`` is said of a vector.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = STEPS,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "steps": steps,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "dtype": dtype,
            "matrices": None,
            "stacked": False,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a state, of an older version too."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("dtype", None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, after checking its values."""
        super().add_param_group(param_group)
        check_last(self, _check)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # PyTorch says None or float
        """Moves the parameters that have a gradient."""
        loss = begin_step(self, closure)
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            self._move_matrices(group, [p for p in moved if _is_matrix(group, p)])
            self._move_others(group, [p for p in moved if not _is_matrix(group, p)])
        return loss

    def _move_matrices(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        lr, stacked = group["lr"], group["stacked"]
        for alike in of_one_shape(params):
            directions = [as_matrices(self._direction(group, p), stacked) for p in alike]
            updates = newton_schulz(torch.stack(directions), group["steps"], group["dtype"])
            scale = 0.2 * max(updates.shape[-2:]) ** 0.5
            for p, update in zip(alike, updates, strict=True):
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(update.view(p.shape), alpha=lr * scale)

    def _direction(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        """Takes a gradient into the momentum, and returns what is to be made orthonormal."""
        state, grad = self.state[p], gradient(p)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        mean = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean

    def _move_others(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        grads, decay = [gradient(p) for p in params], group["weight_decay"]
        move_by_adam(group, params, grads, self.state, weight_decay=decay)


def _check(group: Mapping[str, Any]) -> None:
    ranges = {
        "lr": (group["lr"] >= 0, "0 or more"),
        "momentum": (0 <= group["momentum"] < 1, "0 or more and below 1"),
        "steps": (group["steps"] >= 1, "1 or more"),
        "betas": (all(0 <= beta < 1 for beta in group["betas"]), "two numbers, each below 1"),
        "eps": (group["eps"] > 0, "more than 0"),
        "weight_decay": (group["weight_decay"] >= 0, "0 or more"),
    }
    check_ranges("Muon", group, ranges)
    dtype = group["dtype"]
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"Muon: dtype={dtype}; use a floating type, as torch.bfloat16")
    if group["matrices"]:
        for k, p in enumerate(group["params"]):
            if p.dim() < 2:
                raise ValueError(
                    f"Muon: {called(group, k)} is a vector in a group with matrices=True; put it "
                    f"into one with matrices=False"
                )


def _is_matrix(group: Mapping[str, Any], p: Tensor) -> bool:
    return p.dim() >= 2 if group["matrices"] is None else group["matrices"]
