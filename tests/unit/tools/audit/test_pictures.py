"""Pictures of rows, read back as any program reads them."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

from outergrad.tools.audit.pictures import data_uri, png


def pixels(encoded: bytes) -> Tensor:
    """Bytes (height, width, channels) of an unfiltered PNG, whose checksums are looked at."""
    assert encoded.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, {}
    while at < len(encoded):
        (length,) = struct.unpack_from("!I", encoded, at)
        kind, content = encoded[at + 4 : at + 8], encoded[at + 8 : at + 8 + length]
        assert struct.unpack_from("!I", encoded, at + 8 + length)[0] == zlib.crc32(kind + content)
        chunks[kind], at = content, at + 12 + length
    width, height, _, colour, *_ = struct.unpack("!2I5B", chunks[b"IHDR"])
    lines = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8)
    return lines.view(height, -1)[:, 1:].reshape(height, width, 3 if colour == 2 else 1)


def test_gray_and_coloured_images_come_back():
    for channels in (1, 3):
        image = torch.randint(256, (channels, 5, 7), dtype=torch.uint8)
        assert torch.equal(pixels(png(image)).permute(2, 0, 1), image)


def test_rows_become_squares_from_black_to_white():
    row = torch.linspace(0, 1, 9)
    encoded = base64.b64decode(data_uri(row, 0.0, 1.0).partition(",")[2])
    found = pixels(encoded)
    assert found.shape == (3, 3, 1)
    assert found.flatten().tolist() == (255 * row).round().int().tolist()
    assert pixels(base64.b64decode(data_uri(row[:7], 0.0, 1.0).partition(",")[2])).shape == (
        3,
        3,
        1,
    )


def test_values_outside_are_clipped():
    encoded = base64.b64decode(
        data_uri(torch.tensor([-5.0, 5.0, 0.5, 0.5]), 0, 1).partition(",")[2]
    )
    assert pixels(encoded).flatten().tolist()[:2] == [0, 255]
