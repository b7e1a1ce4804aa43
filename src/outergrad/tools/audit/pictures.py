"""Rows of data as small pictures in a page."""

from __future__ import annotations

import base64
import math
import struct
import zlib

import torch
from torch import Tensor


def data_uri(row: Tensor, low: float, high: float) -> str:
    """Returns a row as a PNG in a `data:` address.

    An image (1 or 3 channels, height, width) is shown as it is; other rows as gray squares, as near
    to a square as they fill.

    Args:
        row: Of any shape.
        low: Value that is black.
        high: Value that is white.
    """
    pixels_CHW = _image(row.detach().float())
    scaled = (pixels_CHW - low) / max(high - low, 1e-30)
    encoded = png((255 * scaled.clamp(0, 1)).round().to(torch.uint8))
    return f"data:image/png;base64,{base64.b64encode(encoded).decode()}"


def _image(row: Tensor) -> Tensor:
    if row.ndim == 3 and row.shape[0] in (1, 3):
        return row
    flat = row.flatten()
    width = math.ceil(len(flat) ** 0.5)
    padded = torch.full((width * math.ceil(len(flat) / width),), float(flat.min()))
    padded[: len(flat)] = flat
    return padded.view(1, -1, width)


def png(pixels_CHW: Tensor) -> bytes:
    """Returns a PNG of bytes (channels, height, width), gray with 1 channel and RGB with 3."""
    channels, height, width = pixels_CHW.shape
    lines_HB = pixels_CHW.permute(1, 2, 0).reshape(height, -1)
    unfiltered = torch.zeros(height, 1, dtype=torch.uint8)
    data = torch.cat([unfiltered, lines_HB], dim=1).contiguous().numpy().tobytes()
    header = struct.pack("!2I5B", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack("!I", len(content)) + kind + content + struct.pack("!I", checksum)
