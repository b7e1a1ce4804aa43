"""Cogradient descent: a sparse variable is moved by what its partner's last step did, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from outergrad.optim.adam import move_by_adam
from outergrad.optim.groups import begin_step, called, check_last, check_ranges

_RULES = ("adam", "sgd")


class CoGD(Optimizer):
    """Minimises bilinear losses with a sparse variable, by cogradient descent.

    In a loss of A x with ‖x‖₁ as penalty, a column A_j learns nothing where x_j is zero: one
    variable stops the other. So A is taken for a function of x, whose derivative is that of the
    last step, and the gradient of x becomes

        g_jn = ∂L/∂x_jn + κ Σ_i ∂L/∂A_ij ∂A_ij/∂x_jn,       ∂A_ij/∂x_jn ≈ ΔA_ij / (N Δx_jn),

    where |x_jn| is small while ‖A_j‖ is large; elsewhere κ is 0. All N entries that meet column j
    had an equal part in its last step. |Δx_jn| is raised to where no ΔA_ij / Δx_jn is above `most`,
    and where it is 0 no derivative is known. Then all move by `rule`, and x shrinks:
    x ← sign(x) max(|x| - η' λ, 0), with η' the length that a gradient of 1 moves an entry:
    η / (1 - μ) under "sgd", η / (√v + ε) under "adam". So x ends where L + λ ‖x‖₁ is least.

    Choose it for two things that are multiplied, one of which should become sparse: codes and a
    dictionary, or scales of channels and the weights that they scale. Groups name a pair, the
    sparse variable first, and the dimension of each that numbers what they share (j):

        optimizer = og.optim.CoGD(
            [
                {"params": [norm.weight, conv.weight], "pair": (0, 0)},
                {"params": [codes_KN, dictionary_PK], "pair": (0, 1)},
                {"params": others},
            ],
            lr=1e-3,
            l1=1e-4,
        )

    Compare it with ``coupling=0``, which is the plain proximal step, before you rely on it: we
    measured where it pays (docs/related.md). It keeps the last values of both besides the state of
    `rule`.

    Source: Zhuo et al., arXiv 2006.09142, and arXiv 2106.10617. For one sample with residual
    Ĝ = A x - b the sum above is their x_j Σ_i Ĝ_i ∂A_ij/∂x_j, so with ``rule="sgd"``,
    ``momentum=0`` and ``coupling=1`` the step is theirs, but for the clipped Δx.

    Args:
        params: Parameters, named parameters or groups. A group of two with ``pair=(d, e)`` is a
            sparse variable and its partner, of equal size in dimension d of one and e of the other.
        lr: Learning rate η.
        l1: λ, the penalty on the sparse variables of pairs.
        coupling: κ.
        small: Share of the mean magnitude of x below which an entry of x is small.
        large: Share of the mean norm of A's columns from which on a column is large.
        most: Largest ΔA_ij / Δx_jn that is believed.
        rule: How a gradient moves a parameter: "adam", or "sgd" with momentum.
        momentum: μ of "sgd".
        betas: Decays of Adam's two means.
        eps: Adam's smallest denominator.
        weight_decay: Decoupled, for all but the sparse variables.

    Raises:
        ValueError: A value is out of range, or a pair is none.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        l1: float = 0.0,
        coupling: float = 1.0,
        small: float = 0.5,
        large: float = 0.5,
        most: float = 1.0,
        rule: Literal["adam", "sgd"] = "adam",
        momentum: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "l1": l1,
            "coupling": coupling,
            "small": small,
            "large": large,
            "most": most,
            "rule": rule,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "pair": None,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, after checking its values."""
        super().add_param_group(param_group)
        check_last(self, _check)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # PyTorch says None or float
        """Moves the parameters that have a gradient."""
        loss = begin_step(self, closure)
        for group in self.param_groups:
            moved = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if group["pair"] is None:
                self._move(group, moved, group["weight_decay"])
            else:
                self._move_pair(group, dict(moved))
        return loss

    def _move_pair(self, group: Mapping[str, Any], grads: dict[Tensor, Tensor]) -> None:
        sparse, partner = group["params"]
        if len(grads) == 2:  # a step of one alone tells nothing of how they hang together
            if group["coupling"] and "before" in self.state[sparse]:
                grads[sparse] = grads[sparse] + self._through_partner(group, grads[partner])
            for p in (sparse, partner):
                self.state[p]["before"] = p.clone()
        for p, decay in ((partner, group["weight_decay"]), (sparse, 0.0)):
            if p in grads:
                self._move(group, [(p, grads[p])], decay)
        if sparse in grads:
            shrunk = (sparse.abs() - group["l1"] * self._lengths(group, sparse)).clamp_min_(0)
            sparse.copy_(shrunk.mul_(sparse.sign()))

    def _lengths(self, group: Mapping[str, Any], p: Tensor) -> Tensor | float:
        """Returns how far a gradient of 1 moves each entry, by which a penalty has to move it."""
        if group["rule"] == "sgd":
            return group["lr"] / (1 - group["momentum"])
        state = self.state[p]
        mean_square = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"].item())
        return group["lr"] / mean_square.sqrt_().add_(group["eps"])

    def _through_partner(self, group: Mapping[str, Any], grad: Tensor) -> Tensor:
        """Returns what the gradient of a partner adds to that of its sparse variable."""
        (x, a), (d, e) = group["params"], group["pair"]
        dx, da = (p - self.state[p]["before"] for p in (x, a))
        through_JN = through_partner(
            *(_by_shared(t, d) for t in (x, dx)),
            *(_by_shared(t, e) for t in (a, da, grad)),
            small=group["small"],
            large=group["large"],
            most=group["most"],
        )
        return group["coupling"] * through_JN.view(x.movedim(d, 0).shape).movedim(0, d)

    def _move(
        self, group: Mapping[str, Any], moved: Sequence[tuple[Tensor, Tensor]], decay: float
    ) -> None:
        if group["rule"] == "adam":
            params, grads = [p for p, _ in moved], [grad for _, grad in moved]
            move_by_adam(group, params, grads, self.state, weight_decay=decay)
            return
        for p, grad in moved:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            mean = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
            p.mul_(1 - group["lr"] * decay).sub_(mean, alpha=group["lr"])


def through_partner(
    x_JN: Tensor,
    dx_JN: Tensor,
    a_JI: Tensor,
    da_JI: Tensor,
    grad_JI: Tensor,
    *,
    small: float,
    large: float,
    most: float,
) -> Tensor:
    """Returns Σ_i ∂L/∂A_ij ∂A_ij/∂x_jn, (J, N), where x is small and its partner large, else 0.

    Args:
        x_JN: The sparse variable; J numbers what it shares with the partner.
        dx_JN: Its last step.
        a_JI: The partner.
        da_JI: Its last step.
        grad_JI: Its gradient.
        small: As in `CoGD`.
        large: As in `CoGD`.
        most: As in `CoGD`.
    """
    least_J1 = da_JI.abs().amax(1, keepdim=True) / most
    divisor_JN = dx_JN.abs().maximum(least_J1).clamp_min(torch.finfo(dx_JN.dtype).tiny)
    gain_J1 = (grad_JI * da_JI).sum(1, keepdim=True) / x_JN.shape[1]
    norm_J1 = a_JI.norm(dim=1, keepdim=True)
    applies_JN = (x_JN.abs() < small * x_JN.abs().mean()) & (norm_J1 >= large * norm_J1.mean())
    return torch.where(applies_JN, gain_J1 * dx_JN.sign() / divisor_JN, 0)


def _by_shared(tensor: Tensor, dim: int) -> Tensor:
    """Returns a tensor as a matrix with a row for each index of a dimension."""
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _check(group: Mapping[str, Any]) -> None:
    ranges = {
        **{
            name: (group[name] >= 0, "0 or more")
            for name in ("lr", "l1", "coupling", "small", "large", "weight_decay")
        },
        "most": (group["most"] > 0, "more than 0"),
        "rule": (group["rule"] in _RULES, " or ".join(map(repr, _RULES))),
        "momentum": (0 <= group["momentum"] < 1, "0 or more and below 1"),
        "betas": (all(0 <= beta < 1 for beta in group["betas"]), "two numbers, each below 1"),
        "eps": (group["eps"] > 0, "more than 0"),
    }
    check_ranges("CoGD", group, ranges)
    if group["pair"] is not None:
        _check_pair(group)


def _check_pair(group: Mapping[str, Any]) -> None:
    pair, params = group["pair"], group["params"]
    if len(params) != 2:
        raise ValueError(
            f"CoGD: a group with pair={pair!r} has {len(params)} parameters; give it two, the "
            f"sparse variable first"
        )
    names = [called(group, k) for k in range(2)]
    for p, name in zip(params, names, strict=True):
        if p.is_complex() or not p.numel():
            kind = "complex" if p.is_complex() else "empty"
            raise ValueError(f"CoGD: {name} of a pair is {kind}; use one of real numbers")
    try:
        sizes = [p.shape[dim] for p, dim in zip(params, pair, strict=True)]
    except (IndexError, TypeError, ValueError):
        sizes = []
    if len(set(sizes)) != 1:
        shapes = " and ".join(
            f"{name} {tuple(p.shape)}" for p, name in zip(params, names, strict=True)
        )
        raise ValueError(
            f"CoGD: pair={pair!r} does not number what {shapes} share; name a dimension of each, "
            f"of equal sizes"
        )
