"""What is selected of a gradient: how many entries, which, and the same ones everywhere."""

from __future__ import annotations

import pytest
import torch

from outergrad.linalg import selection
from outergrad.linalg.selection import (
    above,
    blocks_of,
    entries_of,
    leading_blocks,
    random_k,
    top_blocks,
    top_k,
)

NAN, INF = float("nan"), float("inf")
BLOCK = 7
LENGTHS = (1, 2, 6, 7, 8, 100, 4095, 4096, 4097)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(params=[0, selection._SMALL], ids=["by threshold", "by all entries"])
def small(request, monkeypatch):
    """Short gradients, too, are selected from by a threshold."""
    monkeypatch.setattr(selection, "_SMALL", request.param)


def gradient(n, dtype=torch.float32):
    """Heavy tails and, of every eight entries, one that is zero."""
    flat = torch.randn(n) * torch.randn(n).exp()
    flat[::8] = 0
    return flat.to(dtype)


def counts(n):
    return sorted({1, min(2, n), max(1, n // 100), max(1, n // 2), max(1, n - 1), n})


def largest(flat, k):
    """By a stable sort: of equal magnitudes, the first."""
    order = flat.double().abs().nan_to_num(nan=INF, posinf=1e300).sort(descending=True, stable=True)
    return order.indices[:k].sort().values


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("select", [top_k, above])
def test_the_largest_are_those_of_a_stable_sort(select, n, dtype):
    flat = gradient(n, dtype)
    for k in counts(n):
        assert select(flat, k).equal(largest(flat, k))


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_a_threshold_selects_the_same_of_many_entries(density):
    flat = gradient(300_000)
    k = round(density * len(flat))
    assert len(flat) > selection._SMALL
    assert above(flat, k).equal(top_k(flat, k))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("select", [top_k, above, lambda flat, k: top_blocks(flat, k, BLOCK)])
def test_it_is_the_same_in_float64_and_again(select):
    flat = gradient(4097)
    for k in counts(len(flat)):
        assert select(flat, k).equal(select(flat.double(), k))
        assert select(flat, k).equal(select(flat.clone(), k))


ODD = {
    "zeros": torch.zeros(1000),
    "few that are not zero": torch.zeros(1000).index_fill(0, torch.tensor([3, 500, 999]), -2.0),
    "all alike": torch.full((1000,), -0.5),
    "signs": torch.arange(1000).remainder(3).float() - 1,
    "all NaN": torch.full((1000,), NAN),
    "some NaN": torch.randn(1000).index_fill(0, torch.arange(0, 1000, 9), NAN),
    "one NaN": torch.randn(1000).index_fill(0, torch.tensor([77]), -NAN),
    "some infinite": torch.randn(1000).index_fill(0, torch.arange(0, 1000, 50), -INF),
    "subnormal": torch.randn(1000) * 1e-42,
    "huge": torch.randn(1000).clamp(-3, 3) * 1e38,
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("select", [top_k, above])
def test_odd_numbers_are_selected_from_alike(select, name):
    flat = ODD[name]
    for k in (1, 10, 100, 333, 999, 1000):
        found = select(flat, k)
        assert found.equal(largest(flat, k))
    assert 77 in select(ODD["one NaN"], 1)


@pytest.mark.parametrize("name", ODD)
def test_odd_numbers_have_blocks(name):
    for k in (1, 10, 100, 333, 999, 1000):
        found = top_blocks(ODD[name], k, BLOCK)
        assert len(found) == blocks_of(1000, k, BLOCK)[1]
        assert (found[1:] > found[:-1]).all()


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("block", [1, 2, BLOCK, 64, 5000])
def test_blocks_are_the_largest_and_have_the_entries_that_were_said(n, block):
    flat = gradient(n)
    padded = torch.zeros(-(-n // block) * block)
    padded[:n] = flat
    norms = padded.view(-1, block).double().norm(dim=1)
    for k in counts(n):
        count, entries = blocks_of(n, k, block)
        chosen, found = leading_blocks(flat, k, block), top_blocks(flat, k, block)
        assert chosen.equal(largest(norms, count))
        assert len(found) == entries == min(n, count * block)
        assert (found[1:] > found[:-1]).all()
        assert 0 <= found[0] <= found[-1] < n
        assert {*(found // block).tolist()} >= {*chosen.tolist()}


@pytest.mark.parametrize(("n", "k", "expected"), [(100, 1, 1), (100, 10, 1), (100, 11, 2)])
def test_the_number_of_blocks_is_rounded_half_up(n, k, expected):
    assert blocks_of(n, k, BLOCK) == (expected, expected * BLOCK)
    assert blocks_of(n, n, BLOCK) == (14, 98)  # the fifteenth is of two entries
    assert [blocks_of(n, k, 4)[0] for k in (1, 2, 5, 6, 9, 10)] == [1, 1, 1, 2, 2, 3]


def test_what_the_short_last_block_lacks_is_taken_from_the_first_other_one():
    found = entries_of(torch.tensor([0, 2]), 10, 4)
    assert found.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert entries_of(torch.tensor([1]), 10, 4).tolist() == [4, 5, 6, 7]
    assert entries_of(torch.tensor([0, 1, 2]), 10, 4).tolist() == [*range(10)]


@pytest.mark.parametrize("n", [*LENGTHS, 1 << 40])
def test_random_places_are_distinct_and_repeat(n):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for k in counts(min(n, 5000)):
        found = random_k(n, k, seed=3)
        assert len(found) == k
        assert (found[1:] > found[:-1]).all()
        assert 0 <= found[0] <= found[-1] < n
        assert found.equal(random_k(n, k, seed=3))
    assert torch.get_rng_state().equal(before)


def test_random_places_are_the_same_in_every_version():
    assert random_k(1000, 8, seed=0).tolist() == [41, 43, 290, 490, 598, 692, 827, 958]
    expected = [78511612635, 518338791185, 635765978059, 761816683187]
    assert random_k(1 << 40, 4, seed=-(1 << 70)).tolist() == expected


def test_every_pair_of_places_is_drawn_equally_often():
    """Chi-squared of 45 pairs, 44 degrees of freedom: above 80 with a probability of 1e-3."""
    draws, pairs = 2000, torch.zeros(10, 10)
    for seed in range(draws):
        first, second = random_k(10, 2, seed).tolist()
        pairs[first, second] += 1
    found = pairs[torch.triu_indices(10, 10, 1).unbind()]
    expected = draws / 45
    assert found.sum() == draws
    assert ((found - expected) ** 2 / expected).sum() < 80


def test_many_places_are_spread_evenly():
    found = random_k(1 << 20, 1 << 14, seed=1)
    of_part = torch.bincount(found >> 14, minlength=64)
    of_low_bits = torch.bincount(found & 63, minlength=64)
    for part in (of_part, of_low_bits):
        assert ((part - 256.0) ** 2 / 256).sum() < 115  # 63 degrees of freedom: 1e-4


@pytest.mark.parametrize("k", [0, -1, 11])
def test_a_number_of_entries_that_there_is_not_is_refused(k):
    flat = torch.randn(10)
    for select in (
        lambda: top_k(flat, k),
        lambda: above(flat, k),
        lambda: random_k(10, k, 0),
        lambda: top_blocks(flat, k, 2),
    ):
        with pytest.raises(ValueError, match="use a number from 1 to 10"):
            select()
    with pytest.raises(ValueError, match="use at least 1 entry"):
        top_blocks(flat, 3, 0)


@pytest.mark.parametrize("wrong", [torch.randn(4, 3), torch.tensor(1.0), torch.arange(9)])
def test_what_is_not_a_flat_gradient_is_refused(wrong):
    for select in (top_k, above, lambda flat, k: top_blocks(flat, k, 2)):
        with pytest.raises(ValueError, match=r"use gradient.flatten\(\)"):
            select(wrong, 1)


def test_a_gradient_need_not_lie_side_by_side():
    flat = gradient(600_000)[::2]
    assert not flat.is_contiguous()
    for select in (top_k, above, lambda flat, k: top_blocks(flat, k, 64)):
        assert select(flat, 1000).equal(select(flat.contiguous(), 1000))
