"""No single bit of what has arrived can change unseen."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from outergrad.messages.checksum import Digest, SummedRoom, checksum, combined


@pytest.mark.parametrize("nbytes", [1, 7, 8, 65, 512, 1037])
def test_every_bit_counts(nbytes):
    message = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    before = int(checksum(message))
    whole = combined([5, before, 7])
    for k in range(nbytes):
        for bit in range(8):
            message[k] ^= 1 << bit
            assert int(checksum(message)) != before, (k, bit)
            assert combined([5, int(checksum(message)), 7]) != whole, (k, bit)
            message[k] ^= 1 << bit


def test_the_order_counts():
    a, b = torch.arange(100.0), torch.arange(100.0).flip(0)
    assert checksum(a) != checksum(b)
    assert combined([1, 2]) != combined([2, 1])


def test_a_combined_one_fits_into_a_word():
    extremes = [-(1 << 63), (1 << 63) - 1, -1, 0]
    assert all(0 <= combined([x, y]) < 1 << 62 for x in extremes for y in extremes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 63, 64, 1000])
def test_every_bit_in_a_summed_room_is_seen(dtype: torch.dtype, size: int) -> None:
    room = SummedRoom(torch.empty(0, dtype=dtype), size)
    room.tensor.copy_(torch.randn(size, generator=torch.Generator().manual_seed(0)))
    before, again = int(room.checksum()), SummedRoom(room.tensor, size)
    again.tensor.copy_(room.tensor)
    assert int(again.checksum()) == before
    whole = room.tensor.view(torch.uint8)
    for k in range(0, len(whole), 7):
        whole[k] ^= 1 << k % 8
        assert int(room.checksum()) != before, k
        whole[k] ^= 1 << k % 8


def test_a_digest_is_computed_once_whoever_asks():
    calls, found = [], []

    def compute():
        calls.append(1)
        time.sleep(0.02)
        return len(calls)

    digest = Digest(compute)
    assert not calls
    threads = [threading.Thread(target=lambda: found.append(int(digest))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4
    assert combined([digest, 2]) == combined([1, 2])
