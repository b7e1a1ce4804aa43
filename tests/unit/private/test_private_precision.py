"""No clipped gradient is longer than C, in whatever precision a training computes."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.linalg.full_precision import full_precision
from outergrad.linalg.sample_products import Vector
from ranks import run_on_lasting_groups

CLIP = 0.4


def length_of_sum(model, x, *, within: Any = nullcontext, loss=torch.mean, **about):
    """Length of the clipped sum of a site, with next to no noise on it."""

    def body(rank, group):
        own = copy.deepcopy(model)
        private = og.Private(clip=CLIP, noise=1e-12, batch=1, **about)
        session = og.distribute(own, og.Dense(), group=group, transform=private)
        with within():
            loss(own(x)).backward()
        session.detach()
        return sum(float(p.grad.double().square().sum()) for p in own.parameters()) ** 0.5

    return run_on_lasting_groups(1, body)[0]


@pytest.mark.parametrize("numbers", [1, 100_000, 4_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_long_vectors_are_exact(numbers, dtype):
    """In float32 PyTorch's norm on a CPU is too small by a part in 600.

    Lengths are right to half of what samples are clipped as longer (`roundings`).
    """
    g_BE = torch.stack([torch.full((numbers,), 0.1), torch.randn(numbers)]).to(dtype)
    found = Vector("w", (0, numbers), g_BE)
    expected = g_BE.double().square().sum(dim=1)
    rtol = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    torch.testing.assert_close(found.inner(found), expected, rtol=rtol, atol=0)
    times_B = torch.tensor([3.0, -0.5], dtype=dtype)
    scaled = Vector("w", (0, numbers), g_BE, times_B)
    torch.testing.assert_close(scaled.inner(scaled), expected * times_B.double() ** 2)


def test_large_weights_whose_gradients_are_formed_early_are_clipped():
    model = nn.Linear(1500, 1500, bias=False)
    x = torch.randn(1, 1, 1500) + torch.randn(1, 1000, 1500)
    found = length_of_sum(model, x, loss=lambda y: y.square().mean())
    assert CLIP * 0.999 < found < CLIP * (1 + 2e-6)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_backward_within_autocast_adds_up_in_float32(clipping):
    """Rows that nearly cancel show it: of products in bfloat16 little is left but errors."""
    model, x = nn.Linear(64, 64, bias=False), torch.randn(1, 8, 64).repeat(1, 2, 1)
    delta = torch.randn(1, 8, 64)
    deltas = 100 * torch.cat([delta, -0.98 * delta], dim=1)

    def loss(y):
        return (y.float() * deltas).sum()

    def within():
        return torch.autocast("cpu", torch.bfloat16)

    found = length_of_sum(model, x, within=within, loss=loss, clipping=clipping)
    assert CLIP * 0.9998 < found < CLIP * (1 + 2e-6)


@pytest.fixture
def precision():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
def test_transforms_compute_in_the_highest_precision(precision, chosen):
    seen = []

    class Watching(og.Private):
        def __call__(self, gradient):
            seen.append(torch.get_float32_matmul_precision())
            return super().__call__(gradient)

    def body(rank, group):
        model = nn.Linear(3, 2)
        transform = Watching(clip=1.0, noise=1.0, batch=4)
        session = og.distribute(model, og.Dense(), group=group, transform=transform)
        model(torch.randn(2, 3)).mean().backward()
        session.detach()

    torch.set_float32_matmul_precision(chosen)
    run_on_lasting_groups(2, body)
    assert seen == ["highest"] * 2
    assert torch.get_float32_matmul_precision() == chosen


def test_threads_give_the_precision_back_together(precision):
    torch.set_float32_matmul_precision("high")
    with full_precision(torch.device("cpu")):

        def other():
            with full_precision(torch.device("cpu")):
                pass

        thread = Thread(target=other)
        thread.start()
        thread.join()
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"


def test_sums_of_narrow_weights_do_not_wait_without_noise():
    """One sample of 1,000 would change the rounded sum by five times C."""

    def body(rank, group):
        model = nn.Linear(3, 2).bfloat16()
        private = og.Private(clip=1.0, noise=1.0, batch=4)
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        with session.no_sync(), pytest.raises(RuntimeError, match="rounding of all numbers"):
            model(torch.randn(2, 3, dtype=torch.bfloat16)).mean().backward()
        session.detach()

    run_on_lasting_groups(1, body)
