"""Sparse gradients: sums are those of dense float64, and the same bits in every order of sites."""

from __future__ import annotations

import pytest
import torch

from outergrad.linalg.selection import random_k, top_k
from outergrad.linalg.sparse import Sparse, accumulated, add_, dense, masked, merged, picked

SHAPES = [(1,), (50,), (7, 9), (4, 3, 5, 5)]
DTYPES = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 8e-3}


def part(shape, k, seed, dtype=torch.float32):
    gradient = torch.randn(shape).to(dtype)
    return picked(gradient, random_k(gradient.numel(), k, seed))


def in_float64(sparse):
    flat = torch.zeros(sparse.shape, dtype=torch.float64).flatten()
    for value, place in zip(sparse.values_K.tolist(), sparse.indices_K.tolist(), strict=True):
        flat[place] += value
    return flat.view(sparse.shape)


def counts(shape):
    n = torch.Size(shape).numel()
    return sorted({1, max(1, n // 3), n})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_of_its_largest_entries(shape, dtype):
    gradient = torch.randn(shape).to(dtype)
    for k in counts(shape):
        sparse = picked(gradient, top_k(gradient.flatten(), k))
        assert sparse.shape == gradient.shape
        assert dense(sparse).dtype == dtype
        assert dense(sparse).double().equal(in_float64(sparse))
        assert dense(sparse).count_nonzero() == k
    assert dense(sparse).equal(gradient)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_values", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1 / 3, -2.0])
def test_it_is_added_to_what_is_there(shape, dtype, of_values, scale):
    for k in counts(shape):
        sparse, out = part(shape, k, seed=1, dtype=of_values), torch.randn(shape).to(dtype)
        expected = out.double() + scale * in_float64(sparse)
        assert add_(out, sparse, scale) is out
        size = expected.abs().max()
        assert (out.double() - expected).abs().max() <= 2 * DTYPES[dtype] * size


def test_it_is_added_whatever_the_strides():
    sparse = part((4, 6, 5, 5), 100, seed=2)
    out = torch.randn(4, 6, 5, 5)
    expected = add_(out.clone(), sparse, 0.5)
    for same in (out.to(memory_format=torch.channels_last), out.mT.contiguous().mT):
        assert not same.is_contiguous()
        assert add_(same, sparse, 0.5).equal(expected)


def test_nothing_is_added_of_scale_0():
    nan = Sparse(torch.full((2,), float("nan")), torch.tensor([0, 3]), torch.Size([5]))
    assert add_(torch.ones(5), nan, 0.0).equal(torch.ones(5))
    assert add_(torch.ones(5), nan).isnan().sum() == 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sites", [1, 2, 5])
def test_a_sum_is_that_of_dense_gradients(shape, dtype, sites):
    for k in counts(shape):
        parts = [part(shape, k, seed, dtype) for seed in range(sites)]
        found = merged(parts)
        expected = sum(in_float64(one) for one in parts)
        places = {place for one in parts for place in one.indices_K.tolist()}
        assert found.indices_K.tolist() == sorted(places)
        assert found.values_K.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        error = (in_float64(found) - expected).abs().max()
        assert error <= 4 * DTYPES[torch.float64 if dtype == torch.float64 else torch.float32]
        assert found.shape == torch.Size(shape)


def test_a_sum_is_rounded_in_the_order_of_its_parts():
    parts = [part((100,), 60, seed) for seed in range(6)]
    expected = torch.zeros(100)
    for one in parts:
        expected += dense(one)
    assert dense(merged(parts)).equal(expected)
    again = merged([Sparse(*(t.clone() for t in one[:2]), one.shape) for one in parts])
    assert again.values_K.equal(merged(parts).values_K)


def test_what_does_not_fit_is_refused():
    one, other = part((5,), 2, 0), part((6,), 2, 0)
    with pytest.raises(ValueError, match=r"\(5,\) and \(6,\)"):
        merged([one, other])
    with pytest.raises(ValueError, match="nothing"):
        merged([])
    with pytest.raises(ValueError, match=r"shape \(5,\) for \(6,\)"):
        add_(torch.zeros(6), one)


def test_all_entries_sent_at_every_step_are_momentum():
    """Deep Gradient Compression with k = n is SGD with momentum, to the bit."""
    u, v, momentum = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 4)
    everything = torch.arange(12)
    for _ in range(5):
        g = torch.randn(3, 4)
        before = u.clone(), v.clone()
        momentum = 0.9 * momentum + g
        new_u, new_v = accumulated(u, v, g, 0.9)
        assert u.equal(before[0])
        assert v.equal(before[1])
        assert new_v.equal(momentum)
        u = new_u
        _, v = masked(new_u, new_v, everything)
        assert v.equal(torch.zeros(3, 4))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_entry_that_is_sent_late_brings_the_momentum_of_all_its_steps(momentum):
    steps = [torch.randn(2, 5, dtype=torch.float64) for _ in range(6)]
    u = v = torch.zeros(2, 5, dtype=torch.float64)
    for g in steps:
        u, v = accumulated(u, v, g, momentum)
    weights = [sum(momentum**j for j in range(6 - i)) for i in range(6)]
    expected = sum(w * g for w, g in zip(weights, steps, strict=True))
    assert torch.allclose(v, expected, rtol=1e-12, atol=1e-12)


def test_sent_entries_are_forgotten_and_others_stay():
    u, v = torch.randn(4, 5), torch.randn(4, 5)
    sent = top_k(v.flatten(), 7)
    new_u, new_v = masked(u, v, sent)
    assert (new_v + dense(picked(v, sent))).equal(v)
    assert (new_u + dense(picked(u, sent))).equal(u)
    assert new_u.flatten()[sent].count_nonzero() == 0
    assert u.count_nonzero() == v.count_nonzero() == 20


def test_what_is_kept_keeps_its_dtype():
    u, v = torch.randn(6).bfloat16(), torch.randn(6).bfloat16()
    for kept in (*accumulated(u, v, torch.randn(6), 0.9), *masked(u, v, torch.tensor([1]))):
        assert kept.dtype == torch.bfloat16
