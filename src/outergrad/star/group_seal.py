"""The keys of the sites of one group, so that neither the hub nor other sites read its messages."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from outergrad.core.errors import ExchangeError
from outergrad.star.frames import ALL, Place
from outergrad.star.masks import Masks
from outergrad.star.sealing import derived

KEY_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 12, 16
LONGER_BYTES = _NONCE_BYTES + _TAG_BYTES
"""Bytes by which a sealed message is longer: a nonce, and what shows that nothing was changed."""
_MOST_BYTES = (1 << 31) - 1
_ABOUT = struct.Struct("!BBHQHH")


class GroupSeal:
    """The keys of one site in a group.

    Nonces are drawn: places of messages between two sites are digests, which could be equal. What a
    message is about is bound to it, so the hub cannot pass it off as another.

    Args:
        pairs: secrets that this site shares with each other site of the group alone, for messages.
        masks: the same, for masks.
        rank: of this site, in the run as those of the others.
        named: returns the name of a site.
    """

    longer_bytes = LONGER_BYTES

    def __init__(
        self,
        pairs: Mapping[int, bytes],
        masks: Mapping[int, bytes],
        rank: int,
        named: Callable[[int], str],
    ) -> None:
        self.key = AESGCM.generate_key(8 * KEY_BYTES)
        self._rank, self._named = rank, named
        self._pairs = {other: AESGCM(secret) for other, secret in pairs.items()}
        self._keys, self._masks = {rank: self.key}, dict(masks)
        self._senders = {rank: AESGCM(self.key)}

    def learn(self, rank: int, key: bytes) -> None:
        """Takes the key with which another site encrypts messages to all."""
        self._keys[rank], self._senders[rank] = key, AESGCM(key)

    def sealed(self, place: Place, payload: bytes, to: int = ALL) -> bytes:
        """Encrypts a message for all sites of the group, or for one.

        Raises:
            ValueError: the message is too long.
        """
        self.refuse_long(len(payload))
        key, nonce = self._key(self._rank, to), secrets.token_bytes(_NONCE_BYTES)
        return nonce + key.encrypt(nonce, payload, _about(place, self._rank, to))

    def refuse_long(self, nbytes: int) -> None:
        """Checks the length of a message before it is sealed.

        Raises:
            ValueError: it is too long.
        """
        if nbytes > _MOST_BYTES:
            told = f"a tensor of {nbytes} bytes: with blind=1 a message has at most"
            raise ValueError(f"{told} {_MOST_BYTES}: send it in parts")

    def opened(self, place: Place, sender: int, payload: memoryview, to: int = ALL) -> bytearray:
        """Decrypts a message of another site.

        Raises:
            ExchangeError: that site has not encrypted this message for this place.
        """
        nonce, rest = payload[:_NONCE_BYTES], payload[_NONCE_BYTES:]
        try:
            return bytearray(self._key(sender, to).decrypt(nonce, rest, _about(place, sender, to)))
        except InvalidTag:
            told = f"what came from {self._named(sender)} was not encrypted by it"
            raise ExchangeError(told, (sender,)) from None

    def masks(self) -> Masks:
        """Returns the masks of this site's sums, once all keys have come."""
        ranks = sorted(self._keys)
        pairs = {ranks.index(other): secret for other, secret in self._masks.items()}
        return Masks(pairs, derived(self._keys[ranks[0]], b"masks of all"), ranks.index(self._rank))

    def _key(self, sender: int, to: int) -> AESGCM:
        if to == ALL:
            return self._senders[sender]
        return self._pairs[to if sender == self._rank else sender]


def _about(place: Place, sender: int, to: int) -> bytes:
    return _ABOUT.pack(place.kind, place.dtype, place.lane, place.number, sender, to)
