"""Numbers of few bits, packed."""

import pytest
import torch

from outergrad.wire.few_bits import FewBits, Int2, Int3, Int4


@pytest.mark.parametrize("codec", [Int2(), Int3(), Int4()])
@pytest.mark.parametrize("shape", [(8,), (3, 64), (2, 5, 200), (0, 16)])
def test_numbers_follow_each_other_from_the_lowest_bits(codec, shape):
    half = 1 << (codec.bits - 1)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-half, half, shape, dtype=torch.int8, generator=generator)
    packed = codec._packed(codes.clone())
    expected = (codes.long()[..., None] >> torch.arange(codec.bits) & 1).flatten(-2)
    assert bits_of(packed).equal(expected)
    assert codec._unpacked(packed).equal(codes)


def test_four_bits_have_a_shorter_way_to_the_same_bytes():
    codes = torch.randint(-8, 8, (7, 64), dtype=torch.int8)
    packed = Int4()._packed(codes)
    assert packed.equal(FewBits._packed(Int4(), codes))
    assert Int4()._unpacked(packed).equal(FewBits._unpacked(Int4(), packed))


def bits_of(packed: torch.Tensor) -> torch.Tensor:
    """Of bytes, the lowest first."""
    return (packed.long()[..., None] >> torch.arange(8) & 1).flatten(-2)
