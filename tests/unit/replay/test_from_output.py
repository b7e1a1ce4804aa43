from __future__ import annotations

import pytest
import torch
from torch import nn

from outergrad.replay.layer import delta_before

FUNCTIONS = {
    "relu": nn.ReLU(),
    "leaky": nn.LeakyReLU(0.01),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.7, 0.9),
    "hardsigmoid": nn.Hardsigmoid(),
    "elu": nn.ELU(0.7),
    "celu": nn.CELU(0.7),
    "selu": nn.SELU(),
    "softplus": nn.Softplus(2.0),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "logsigmoid": nn.LogSigmoid(),
    "softsign": nn.Softsign(),
}

BY_HAND = {
    nn.Hardsigmoid: lambda x: ((x > -3) & (x < 3)).to(x.dtype) / 6,
    nn.CELU: lambda x: torch.where(x > 0, torch.ones_like(x), (x / 0.7).exp()),
}
"""PyTorch's own derivatives of these have constants in float32 also in float64."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_derivatives_are_as_precise_as_their_dtype(function, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 7, generator=generator, dtype=dtype).requires_grad_()
    d = torch.randn(50, 7, generator=generator, dtype=dtype)
    y = function(x)
    if type(function) in BY_HAND:
        expected = BY_HAND[type(function)](x.detach()) * d
    else:
        (expected,) = torch.autograd.grad(y, x, d)
    found = delta_before(function, y.detach(), d)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=64 * torch.finfo(dtype).eps)
