"""SyncBatchNorm on CPUs: PyTorch has its five kernels for GPUs alone, here they are formulas."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn


def install() -> None:
    """Lets `torch.nn.SyncBatchNorm` compute on CPUs in this process; its collectives stay."""
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        setattr(torch, kernel.__name__, kernel)
    nn.SyncBatchNorm.forward = _allowed(nn.SyncBatchNorm.forward)  # type: ignore[method-assign]


def _allowed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward, which allows devices of third parties by their name: here that is the CPU."""

    def allowed(self: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        with patch("torch._C._get_privateuse1_backend_name", lambda: "cpu"):
            return forward(self, x)

    return allowed


def _all_but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _wide(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of each channel, of this rank."""
    var, mean = torch.var_mean(x.float(), _all_but_channels(x), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean_SC: Tensor,
    invstd_SC: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count_S: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same of all ranks, whose running statistics follow."""
    count_S1, n = count_S.view(-1, 1), count_S.sum()
    mean = (mean_SC * count_S1).sum(0) / n
    var = ((invstd_SC**-2 - eps + (mean_SC - mean) ** 2) * count_S1).sum(0) / n
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * n / (n - 1)).to(running_var.dtype), momentum)
    return mean, (var + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """The output."""
    y = (x - _wide(mean, x)) * _wide(invstd, x)
    y = y if weight is None else y * _wide(weight, x)
    y = y if bias is None else y + _wide(bias, x)
    return y.to(x.dtype) if out is None else out.copy_(y)


def batch_norm_backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    of_input: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sums over this rank that the gradient of the input needs, and those of the parameters."""
    sum_dy = dy.float().sum(_all_but_channels(x))
    sum_dy_xmu = (dy.float() * (x - _wide(mean, x))).sum(_all_but_channels(x))
    dtype = dy.dtype if weight is None else weight.dtype
    grad_weight = (sum_dy_xmu * invstd).to(dtype) if of_weight else None
    return sum_dy, sum_dy_xmu, grad_weight, sum_dy.to(dtype) if of_bias else None


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of the input, by the sums over all ranks."""
    n = count.sum()
    of_mean = _wide(sum_dy / n, x)
    of_spread = (x - _wide(mean, x)) * _wide(invstd**2 * sum_dy_xmu / n, x)
    dx = (dy - of_mean - of_spread) * _wide(invstd, x)
    return (dx if weight is None else dx * _wide(weight, x)).to(x.dtype)
