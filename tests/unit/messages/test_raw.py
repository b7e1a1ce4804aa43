"""Tensors come back from their bytes, whatever their dtype, layout and place in a message."""

from __future__ import annotations

import pytest
import torch

from outergrad.messages import raw as _raw
from outergrad.messages.raw import as_tensor, digest, from_raw, in_chunks, raw

TENSORS = [
    torch.randn(3, 5).t(),
    torch.tensor(7),
    torch.zeros(0, 4),
    torch.tensor([True, False]),
    torch.randn(3).to(torch.bfloat16),
    torch.arange(5)[::2],
]


def test_tensors_come_back_from_a_message_of_any_alignment():
    message = torch.cat([as_tensor(b"x"), *map(raw, TENSORS)])
    parts = message[1:].split([t.nbytes for t in TENSORS])
    for part, t in zip(parts, TENSORS, strict=True):
        assert from_raw(part, t.dtype, t.shape).equal(t)
        assert from_raw(part, t.dtype, t.shape).dtype == t.dtype


def test_a_digest_tells_content_from_content():
    found = [digest(b"", [torch.full((2,), k)]) for k in range(3)] + [digest(b"x"), digest(b"y")]
    assert len({*found}) == len(found)
    assert all(0 <= one < 1 << 62 for one in found)
    assert digest(b"", [torch.tensor([1, 2])]) == digest(
        raw(torch.tensor([1, 2])).numpy().tobytes()
    )


@pytest.mark.parametrize("limit", [1, 100, 1 << 26])
def test_chunks_hold_all_tensors_in_their_order_and_end_at_the_limit(limit, monkeypatch):
    monkeypatch.setattr(_raw, "_CHUNK_BYTES", limit)
    tensors = [torch.zeros(k) for k in range(30)]
    chunks = in_chunks(tensors)
    assert [id(t) for chunk in chunks for t in chunk] == [id(t) for t in tensors]
    assert all(sum(t.nbytes for t in chunk[:-1]) < limit for chunk in chunks)
    assert all(sum(t.nbytes for t in chunk) >= limit for chunk in chunks[:-1])
    assert in_chunks([]) == []
