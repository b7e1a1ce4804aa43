"""Muon: orthonormal updates for matrices, and Adam for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from outergrad.optim.adam import move_by_adam
from outergrad.optim.groups import begin_step, called, check_last, check_ranges
from outergrad.optim.orthonormal import STEPS, newton_schulz

_NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
"""Modules whose weights are tables or scales, not matrices that a row of features meets."""

_TOGETHER = 1 << 22
"""Elements of matrices of one shape that are made orthonormal at once: small ones gain by it."""


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
        for alike in _of_one_shape(params):
            directions = [_as_matrices(self._direction(group, p), stacked) for p in alike]
            updates = newton_schulz(torch.stack(directions), group["steps"], group["dtype"])
            scale = 0.2 * max(updates.shape[-2:]) ** 0.5
            for p, update in zip(alike, updates, strict=True):
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(update.view(p.shape), alpha=lr * scale)

    def _direction(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        """Takes a gradient into the momentum, and returns what is to be made orthonormal."""
        state, grad = self.state[p], _gradient(p)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        mean = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean

    def _move_others(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        grads, decay = [_gradient(p) for p in params], group["weight_decay"]
        move_by_adam(group, params, grads, self.state, weight_decay=decay)


def muon_groups(model: nn.Module, adam: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Returns parameter groups for `Muon`: hidden matrices, stacks of matrices, and all others.

    By Adam go vectors, embeddings, norms, the head (the last `nn.Linear`), the first convolution,
    which reads the input, and parameters whose first dimension of three is 1, as positions are.

    Args:
        model: Model whose trained parameters are listed, each once.
        adam: Further patterns of names that Adam moves, as ``*.position``; as in `fnmatch`.
    """
    others = _left_to_adam(model)
    kernels = {id(m.weight) for m in model.modules() if isinstance(m, _ConvNd)}
    patterns = [*adam]
    found: dict[str, list[tuple[str, nn.Parameter]]] = {"matrices": [], "stacks": [], "others": []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            named = any(fnmatchcase(name, pattern) for pattern in patterns)
            left = named or id(p) in others or not _holds_matrices(p)
            stack = p.dim() > 2 and id(p) not in kernels
            found["others" if left else "stacks" if stack else "matrices"].append((name, p))
    rules = {
        "matrices": {"matrices": True},
        "stacks": {"matrices": True, "stacked": True},
        "others": {"matrices": False},
    }
    return [{"params": params, **rules[kind]} for kind, params in found.items() if params]


def _left_to_adam(model: nn.Module) -> set[int]:
    """Returns ids of the parameters of embeddings, norms, the head and the first convolution."""
    found = [m for m in model.modules() if isinstance(m, _NO_MATRICES)]
    found += [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
    found += [m for m in model.modules() if isinstance(m, _ConvNd)][:1]
    return {id(p) for m in found for p in m.parameters(recurse=False)}


def _holds_matrices(p: Tensor) -> bool:
    """True if the first dimension and the others together are both larger than 1."""
    if p.dim() < 2 or not p.numel():
        return False
    return min(p.shape[0], p.numel() // p.shape[0]) > 1


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


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _as_matrices(direction: Tensor, stacked: bool) -> Tensor:
    return direction if stacked or direction.dim() == 2 else direction.flatten(1)


def _of_one_shape(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields parameters of one shape, type and device together, but not too many."""

    def kind(p: Tensor) -> tuple[str, ...]:
        return str(p.shape), str(p.dtype), str(p.device)

    for _, alike in groupby(sorted(params, key=kind), key=kind):
        found = [*alike]
        size = max(1, _TOGETHER // found[0].numel())
        yield from (found[at : at + size] for at in range(0, len(found), size))
