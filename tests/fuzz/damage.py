"""Damage to what a site sends."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Sequence

EXTREMES = (
    *(0, 1, -1, 2, -2, 3, 7, 127, 128, 255, 1 << 15, 1 << 16, 1 << 31, 1 << 32, 1 << 40, 1 << 41),
    *((1 << 53) - 1, 1 << 53, 1 << 62, (1 << 63) - 1, -(1 << 63), -(1 << 31), 0x7FF0000000000000),
)
TEXTS = (b"[", b"]", b"{", b"}", b'"', b",", b"-1", b"1e999", b"null", b"9" * 30, b"\xff", b"NaN")
Change = Callable[[random.Random, bytearray], None]
"""Of a message of at least one byte, in place."""


def flip(r: random.Random, t: bytearray) -> None:
    t[r.randrange(len(t))] ^= 1 << r.randrange(8)


def set_word(r: random.Random, t: bytearray) -> None:
    """The first words, which say what the others are, as often as all others together."""
    count = len(t) // 8
    if count:
        place = r.randrange(min(count, 16) if r.random() < 0.5 else count)
        value = r.choice(EXTREMES) if r.random() < 0.8 else r.randrange(-(1 << 63), 1 << 63)
        struct.pack_into("<q", t, 8 * place, value)


def set_bytes(r: random.Random, t: bytearray) -> None:
    start, count = r.randrange(len(t)), r.randrange(1, 9)
    stop = min(len(t), start + count)
    t[start:stop] = r.randbytes(stop - start)


def splice(r: random.Random, t: bytearray) -> None:
    """A part over another part."""
    length = r.randrange(1, max(2, len(t) // 2))
    source, target = (r.randrange(len(t) - length + 1) for _ in range(2))
    t[target : target + length] = t[source : source + length]


def truncate(r: random.Random, t: bytearray) -> None:
    del t[r.randrange(len(t)) :]


def extend(r: random.Random, t: bytearray) -> None:
    t += t[: r.randrange(1, len(t) + 1)]


def text(r: random.Random, t: bytearray) -> None:
    """A number of a JSON text becomes another, or a piece is put in, once or thousands of times."""
    numbers = [m.span() for m in re.finditer(rb"-?\d+", t)]
    if numbers and r.random() < 0.6:
        start, stop = r.choice(numbers)
        t[start:stop] = str(r.choice(EXTREMES)).encode()
    else:
        place = r.randrange(len(t))
        t[place : place + r.randrange(3)] = r.choice(TEXTS) * r.choice((1, 1, 2, 5000))


SAME_LENGTH: Sequence[Change] = (flip, set_word, set_word, set_bytes, splice)
ANY_LENGTH: Sequence[Change] = (*SAME_LENGTH, truncate, extend)


def damaged(r: random.Random, message: bytes, changes: Sequence[Change]) -> bytearray:
    """A copy with one to three changes."""
    t = bytearray(message)
    for _ in range(r.choice((1, 1, 2, 3))):
        if t:
            r.choice(changes)(r, t)
    return t
