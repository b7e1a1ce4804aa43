"""Products by sample of convolutions are those of their patches, and of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outergrad.core.transform import Samples
from outergrad.core.types import Call
from outergrad.layers.conv import ConvRule
from outergrad.linalg.sample_products import products

LAYERS = {
    "plain": (nn.Conv2d(4, 6, 3), (8, 9)),
    "stride, padding": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (8, 9)),
    "other paddings": (nn.Conv2d(4, 6, 3, stride=(2, 1), padding=(0, 2), bias=False), (8, 9)),
    "dilation, groups": (nn.Conv2d(4, 6, 3, dilation=2, groups=2), (8, 9)),
    "same, even kernel": (nn.Conv2d(4, 6, (2, 3), padding="same"), (8, 9)),
    "reflected": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (8, 9)),
    "circular, one dimension": (nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), (9,)),
    "three dimensions": (nn.Conv3d(4, 6, 2, stride=2, groups=2), (4, 5, 6)),
    "by channel": (nn.Conv2d(4, 8, 3, groups=4), (8, 9)),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same.")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("samples", [1, 3])
def test_products_are_those_of_patches_and_of_autograd(name, samples):
    layer, size = LAYERS[name]
    module = layer.double()
    x = torch.randn(samples, 4, *size, dtype=torch.float64)
    y = module(x)
    d, rule = torch.randn_like(y), ConvRule()
    (slot,) = rule.slots(module, "conv")
    weight_BGOI, bias_BGO = rule.products(module, 0, Call(x, d))
    rows = rule.by_sample(module, 0, Call(x, d), Samples(samples, False, 0))
    weight, bias = products(slot, rows, samples)
    torch.testing.assert_close(weight_BGOI, weight)
    torch.testing.assert_close(bias_BGO, bias)
    for b in range(samples):
        grads = torch.autograd.grad(y[b], list(module.parameters()), d[b], retain_graph=True)
        torch.testing.assert_close(weight_BGOI[b].flatten(), grads[0].flatten())
        if bias_BGO is not None:
            torch.testing.assert_close(bias_BGO[b].flatten(), grads[1])


def test_products_of_bfloat16_are_in_float32():
    module = nn.Conv2d(4, 6, 3).bfloat16()
    x = torch.randn(2, 4, 8, 8).bfloat16()
    d = torch.randn(2, 6, 6, 6).bfloat16()
    weight_BGOI, bias_BGO = ConvRule().products(module, 0, Call(x, d))
    assert bias_BGO is not None
    assert weight_BGOI.dtype == bias_BGO.dtype == torch.float32
