"""Places come back from bytes whose number was known, and damaged bytes are refused."""

from __future__ import annotations

import math

import pytest
import torch

from outergrad.linalg.selection import (
    blocks_of,
    entries_of,
    leading_blocks,
    random_k,
    top_blocks,
)
from outergrad.messages.places import (
    nbytes,
    packed,
    unpacked,
)

LENGTHS = (1, 2, 7, 8, 9, 63, 64, 65, 1000, 4095, 4096, 4097, 100_003, 1 << 33)


def counts(n):
    some = {0, 1, 2, 3, 7, 8, 9, n // 1000, n // 100, n // 10, n // 4, n // 2, n - 1, n}
    return sorted(k for k in some if 0 <= k <= min(n, 60_000))


def least_bytes(n, k):
    """Of a code of fixed length: the logarithm of the number of selections."""
    nats = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return nats / math.log(256)


@pytest.mark.parametrize("n", LENGTHS)
def test_places_come_back(n):
    for k in counts(n):
        places = random_k(n, k, seed=k) if k else torch.empty(0, dtype=torch.int64)
        content = packed(places, n)
        assert content.dtype == torch.uint8
        assert content.shape == (nbytes(n, k),)
        found = unpacked(content, n, k)
        assert found.equal(places)
        assert found.dtype == torch.int64


@pytest.mark.parametrize("n", LENGTHS)
def test_the_first_and_the_last_places_come_back(n):
    for k in counts(n):
        for places in (torch.arange(k), torch.arange(n - k, n)):
            assert unpacked(packed(places, n), n, k).equal(places)


def test_every_selection_of_a_few_entries_comes_back():
    for n in range(1, 11):
        for chosen in range(1 << n):
            places = torch.tensor([i for i in range(n) if chosen >> i & 1], dtype=torch.int64)
            assert unpacked(packed(places, n), n, len(places)).equal(places)


@pytest.mark.parametrize("n", LENGTHS)
def test_bytes_are_few(n):
    for k in counts(n):
        found = nbytes(n, k)
        assert found <= math.ceil(n / 8)
        chunks_of_4096 = 12 * k + 13 * math.ceil(n / 4096)
        if 16 <= k <= n // 4:
            assert found <= chunks_of_4096 / 8 + 8
            assert 8 * found <= 8 * least_bytes(n, k) + 0.76 * k + 64
    assert nbytes(n, 0) == nbytes(n, n) == 0


def test_known_bytes_stay():
    """Sites of two versions must understand each other."""
    assert packed(torch.tensor([3, 77, 600, 999]), 1000).tolist() == [83, 3, 77, 88, 231]
    assert packed(torch.tensor([0, 2, 3, 9]), 10).tolist() == [13, 2]
    assert packed(torch.tensor([5, 70_000]), 100_000).tolist() == [5, 5, 112, 0, 17]


@pytest.mark.parametrize("places", [[3, 3], [4, 2], [-1, 5], [5, 100], [5, 1 << 40]])
@pytest.mark.parametrize("n", [3, 10, 100])
def test_places_that_are_none_are_not_packed(places, n):
    with pytest.raises(ValueError, match=f"sorted, distinct ones below {n}"):
        packed(torch.tensor(places), n)


@pytest.mark.parametrize(("n", "k"), [(10, 11), (10, -1), (-1, 0)])
def test_numbers_of_places_that_cannot_be_are_refused(n, k):
    with pytest.raises(ValueError, match="use a number from 0"):
        nbytes(n, k)
    with pytest.raises(ValueError, match="use a number from 0"):
        unpacked(torch.empty(0, dtype=torch.uint8), n, k)


DAMAGED = [(9, 3), (64, 20), (100, 1), (4097, 7), (4097, 300), (4097, 2000), (100_003, 60)]


@pytest.mark.parametrize(("n", "k"), DAMAGED)
def test_bytes_at_random_are_places_or_refused(n, k):
    for _ in range(100):
        refused_or_valid(torch.randint(256, (nbytes(n, k),)).to(torch.uint8), n, k)
    for value in (0, 255):
        refused_or_valid(torch.full((nbytes(n, k),), value, dtype=torch.uint8), n, k)


@pytest.mark.parametrize(("n", "k"), DAMAGED)
def test_a_changed_bit_is_refused_or_another_place(n, k):
    places = random_k(n, k, seed=0)
    content = packed(places, n)
    for i in range(0, len(content), max(1, len(content) // 40)):
        for bit in range(8):
            damaged = content.clone()
            damaged[i] ^= 1 << bit
            found = refused_or_valid(damaged, n, k)
            assert found is None or packed(found, n).shape == content.shape


def refused_or_valid(content, n, k):
    """None after an error of one line, or else k distinct sorted places below n."""
    found, words = None, ""
    try:
        found = unpacked(content, n, k)
    except ValueError as error:
        words = str(error)
    if found is None:
        assert words.startswith("places")
        assert "\n" not in words
        return None
    assert found.shape == (k,)
    assert (found[1:] > found[:-1]).all()
    assert 0 <= found[0] <= found[-1] < n
    return found


@pytest.mark.parametrize("n", [100, 4097])
def test_bytes_of_another_length_or_type_are_refused(n):
    content = packed(random_k(n, 20, seed=0), n)
    wrong = [content[:-1], torch.cat([content, content[:1]]), content.view(1, -1), content.long()]
    for one in wrong:
        with pytest.raises(ValueError, match=r"^places: .* not \d+ bytes$"):
            unpacked(one, n, 20)


def test_bytes_need_not_lie_side_by_side():
    places = random_k(4097, 300, seed=0)
    content = packed(places, 4097).repeat_interleave(2)[::2]
    assert not content.is_contiguous()
    assert unpacked(content, 4097, 300).equal(places)


@pytest.mark.parametrize("n", [1, 5, 64, 1000, 4097])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_come_back_in_fewer_bytes(n, block):
    flat = torch.randn(n)
    for k in (1, n // 10 + 1, n // 2 + 1, n):
        k = min(k, n)
        chosen = leading_blocks(flat, k, block)
        blocks, count = -(-n // block), len(chosen)
        content = packed(chosen, blocks)
        assert len(content) == nbytes(blocks, count) <= nbytes(n, blocks_of(n, k, block)[1])
        found = unpacked(content, blocks, count)
        assert entries_of(found, n, block).equal(top_blocks(flat, k, block))
