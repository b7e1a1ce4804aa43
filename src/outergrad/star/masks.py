"""Masks of sums: random numbers that sites share, and of which the hub knows none.

Every two sites share some that one adds and the other subtracts, so that the hub can add up what it
cannot read. All sites share some that are left in the sum, so that it cannot read the sum either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

NONCE_BYTES = 12
"""Bytes of a nonce; the cipher counts its blocks in the other four of its sixteen."""
_COUNTER = bytes(4)
_PART_BYTES = 1 << 16
"""Bytes that are masked at a time: they stay in the processor's cache for the masks of all."""
_ZEROS = bytes(_PART_BYTES)

_Combine = Callable[..., np.ndarray]


class Masks:
    """The masks of one site in one run.

    Args:
        pairs: secrets that this site shares with each other site alone, by rank.
        common: secret of all sites.
        rank: of this site.
    """

    def __init__(self, pairs: Mapping[int, bytes], common: bytes, rank: int) -> None:
        self._common = common
        self._own: list[tuple[bytes, _Combine]] = [
            (key, np.subtract if rank > other else np.add) for other, key in pairs.items()
        ]
        if rank == 0:
            self._own.append((common, np.add))

    def hide(self, numbers: np.ndarray, nonce: bytes) -> None:
        """Adds this site's masks to integers in place, modulo their width.

        Args:
            numbers: 1-D; they look like random numbers then.
            nonce: the same on all sites, and of no other call.
        """
        _mask(numbers, self._own, nonce)

    def shown(self, total: np.ndarray, nonce: bytes) -> np.ndarray:
        """Returns the sum of what all sites have hidden under a nonce."""
        clear = total.copy()
        _mask(clear, [(self._common, np.subtract)], nonce)
        return clear


def _mask(numbers: np.ndarray, keys: Sequence[tuple[bytes, _Combine]], nonce: bytes) -> None:
    assert len(nonce) == NONCE_BYTES
    streams = [(_stream(key, nonce), combine) for key, combine in keys]
    for part in _parts(numbers):
        for stream, combine in streams:
            random = stream.update(_ZEROS[: part.nbytes])
            combine(part, np.frombuffer(random, part.dtype), out=part)


def _parts(numbers: np.ndarray) -> Iterator[np.ndarray]:
    length = _PART_BYTES // numbers.itemsize
    for at in range(0, len(numbers), length):
        yield numbers[at : at + length]


def _stream(key: bytes, nonce: bytes) -> Any:
    # AES-CTR takes two thirds of ChaCha20's time where processors have instructions for AES.
    return Cipher(algorithms.AES(key), modes.CTR(nonce + _COUNTER)).encryptor()
