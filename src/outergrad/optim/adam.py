"""A step of Adam, for optimizers that move some of their parameters by it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam


def move_by_adam(
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: MutableMapping[Any, dict[str, Any]],
    *,
    weight_decay: float,
) -> None:
    """Moves parameters by Adam with decoupled weight decay, as `torch.optim.AdamW` does.

    Args:
        group: Has ``lr``, ``betas`` and ``eps``.
        params: Parameters to move.
        grads: Their gradients.
        state: State of the optimizer by parameter; what Adam keeps is made there if it is missing.
        weight_decay: Share of a parameter, times the learning rate, that it loses.
    """
    if not params:
        return
    for p in params:
        if "exp_avg" not in state[p]:
            zeros = torch.zeros_like(p), torch.zeros_like(p)
            state[p].update(step=torch.tensor(0.0), exp_avg=zeros[0], exp_avg_sq=zeros[1])
    states = [state[p] for p in params]
    beta1, beta2 = group["betas"]
    adam(
        [*params],
        [*grads],
        *([one[key] for one in states] for key in ("exp_avg", "exp_avg_sq")),
        max_exp_avg_sqs=[],
        state_steps=[one["step"] for one in states],
        has_complex=any(p.is_complex() for p in params),
        decoupled_weight_decay=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=weight_decay,
        eps=group["eps"],
        maximize=False,
    )
