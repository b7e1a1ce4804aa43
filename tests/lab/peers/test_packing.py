"""Entries of chunks as bytes: how many, and what is read of them."""

from __future__ import annotations

import pytest
import torch

from outergrad_lab.peers.packing import VALUES, Chunks, Entries, Message, packed_bits, unpacked_bits

SHAPES = [(64, 128), (7,), (), (6, 10, 3), (1, 1)]


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("bits", [1, 2, 6, 12])
@pytest.mark.parametrize("count", [1, 3, 8, 37])
def test_codes_are_packed_tightly_and_read_again(bits, count):
    codes = torch.randint(2**bits, (count,), generator=torch.Generator().manual_seed(count))
    content = packed_bits(codes, bits)
    assert content.dtype == torch.uint8
    assert len(content) == -(-count * bits // 8)
    assert unpacked_bits(content, bits, count).equal(codes)


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_are_the_weight(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chunks = Chunks(weight.shape, side=4, entries=3)
    cut = chunks.cut(weight)
    assert cut.shape == (chunks.number, *chunks.chunk)
    assert max(chunks.chunk) <= 4
    assert chunks.joined(cut).equal(weight)
    torch.testing.assert_close(chunks.from_cosines(chunks.cosines(cut)), cut)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", VALUES)
def test_a_message_has_the_places_and_near_values(bits, dtype):
    message = Message(weights(dtype), side=16, entries=5, bits=bits)
    own = [c.largest(c.cut(w)) for c, w in zip(message.chunks, weights(dtype), strict=True)]
    content = message.written(own)
    assert len(content) == message.nbytes
    for sent, read in zip(own, message.read(content), strict=True):
        assert read.places_CK.equal(sent.places_CK)
        error = (read.values_CK - sent.values_CK).abs().amax() / sent.values_CK.abs().amax()
        assert read.values_CK.dtype == dtype
        assert error <= {32: 0, 8: 0.5 / 127 + 1e-6, 2: 0.5}[bits]
        assert (read.values_CK * sent.values_CK).ge(0).all()


@pytest.mark.parametrize("bits", VALUES)
def test_nothing_but_zeros_stays_zero(bits):
    message = Message([torch.zeros(4, 4)], side=4, entries=3, bits=bits)
    (chunks,) = message.chunks
    content = message.written([chunks.largest(torch.zeros(1, 4, 4))])
    (read,) = message.read(content)
    assert chunks.filled(Entries(*read)).abs().sum() == 0


@pytest.mark.parametrize(("entries", "bits", "fewer"), [(32, 8, 204.8), (64, 2, 146.3)])
def test_a_large_weight_takes_as_many_times_fewer_bytes_as_papers_say(entries, bits, fewer):
    weight = torch.zeros(1024, 1024)
    message = Message([weight], side=64, entries=entries, bits=bits)
    assert weight.nbytes / message.nbytes == pytest.approx(fewer, rel=1e-3)
