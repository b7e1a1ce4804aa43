"""End-to-end encryption between sites: the hub relays and adds up what it cannot read.

Each site draws a key pair for key agreement (X25519) and signs the public key with the key of its
certificate, so that the others know its owner. It then shares a secret with each other site, with
which it sends them the key that encrypts its messages to all (AES-GCM). Keys for the masks of sums
(`masks.py`) are derived from these two.
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
from collections.abc import Mapping, Sequence

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from outergrad.core.errors import ExchangeError
from outergrad.star.authority import Kit, check_site, read_certificate
from outergrad.star.frames import ALL, Place
from outergrad.star.masks import Masks

TAG_BYTES = 16
"""Bytes by which a sealed message is longer."""
_KEY_BYTES = 32
_NONCE = struct.Struct("!BBHQ")
_WAY = ec.ECDSA(hashes.SHA256())


class Seal:
    """The keys of one site in one run.

    Args:
        kit: of the site.
        names: of all sites, in rank order.
        rank: of this site.
        run: number of the run: keys of another run are not accepted.
    """

    def __init__(self, kit: Kit, names: Sequence[str], rank: int, run: int) -> None:
        self._kit, self._names, self._rank = kit, tuple(names), rank
        self._about = json.dumps(["outergrad star", run, *names]).encode()
        self._private, self._key = X25519PrivateKey.generate(), AESGCM.generate_key(256)
        self._own = AESGCM(self._key)
        self._secrets: dict[int, bytes] = {}
        self._pairs: dict[int, AESGCM] = {}
        self._masks: dict[int, bytes] = {}
        self._keys = {rank: self._key}
        self._senders = {rank: self._own}

    def announcement(self) -> str:
        """Returns this site's public key, signed."""
        public = self._private.public_key().public_bytes_raw()
        signature = self._kit.identity.private_key.sign(self._signed(self._rank, public), _WAY)
        told = {"key": _text(public), "signature": _text(signature)}
        return json.dumps(told | {"certificate": self._kit.certificate})

    def meet(self, announcements: Mapping[int, str]) -> str:
        """Takes the public keys of all other sites; returns this site's key, encrypted for each.

        Raises:
            ValueError: a key is not of the site under whose name it came.
        """
        for rank, announcement in announcements.items():
            shared = self._secrets[rank] = self._shared(rank, announcement)
            ranks = struct.pack("!HH", *sorted((rank, self._rank)))
            self._pairs[rank] = AESGCM(self._derived(shared, ranks))
            self._masks[rank] = self._derived(shared, ranks + b"masks")
        wrapped = {
            rank: _text(pair.encrypt(self._nonce_of_key(self._rank), self._key, self._about))
            for rank, pair in self._pairs.items()
        }
        return json.dumps(wrapped)

    def learn(self, keys: Mapping[int, str]) -> None:
        """Takes the keys with which the other sites encrypt messages to all.

        Raises:
            ValueError: a key was changed on its way.
        """
        for rank, told in keys.items():
            try:
                wrapped = base64.b64decode(json.loads(told)[str(self._rank)])
                key = self._pairs[rank].decrypt(self._nonce_of_key(rank), wrapped, self._about)
                self._senders[rank], self._keys[rank] = AESGCM(key), key
            except (InvalidTag, ValueError, TypeError, KeyError) as error:
                raise ValueError(f"the key of {self._names[rank]!r} cannot be read") from error

    def sealed(self, place: Place, payload: bytes, recipient: int = ALL) -> bytes:
        """Encrypts a message for all sites, or for one."""
        key = self._own if recipient == ALL else self._pairs[recipient]
        return key.encrypt(_nonce(place, recipient), payload, self._of(self._rank))

    def opened(self, place: Place, sender: int, payload: memoryview, *, of_all: bool) -> bytes:
        """Decrypts a message of another site.

        Args:
            place: of the collective.
            sender: rank of that site.
            payload: the encrypted message.
            of_all: whether the message was for all sites.

        Raises:
            ExchangeError: that site has not encrypted this message for this place.
        """
        key = self._senders[sender] if of_all else self._pairs[sender]
        nonce = _nonce(place, ALL if of_all else self._rank)
        try:
            return key.decrypt(nonce, payload, self._of(sender))
        except InvalidTag:
            told = f"what came from {self._names[sender]} was not encrypted by it"
            raise ExchangeError(told, (sender,)) from None

    def masks(self) -> Masks:
        """Returns the masks of this site's sums.

        A site whose key has not come is gone, and no sum comes out any more. What this one sends is
        hidden all the same, by numbers that nobody else has.
        """
        others = (rank for rank in range(len(self._names)) if rank != self._rank)
        pairs = {rank: self._masks.get(rank) or secrets.token_bytes(_KEY_BYTES) for rank in others}
        of_all = self._keys.get(0) or secrets.token_bytes(_KEY_BYTES)
        return Masks(pairs, self._derived(of_all, b"masks of all"), self._rank)

    def secrets_of_group(self, lane: int, others: Sequence[int], use: bytes) -> dict[int, bytes]:
        """Returns secrets that this site shares with each other site of a group alone, for a use.

        Of a site whose key has not come, as it is gone, it is one that nobody else has.
        """
        about = b"group" + struct.pack("!H", lane) + use
        return {
            rank: self._derived(self._secrets.get(rank) or secrets.token_bytes(_KEY_BYTES), about)
            for rank in others
        }

    def _shared(self, rank: int, announcement: str) -> bytes:
        name = self._names[rank]
        try:
            told = json.loads(announcement)
            public, signature = (base64.b64decode(told[part]) for part in ("key", "signature"))
            certificate = read_certificate(told["certificate"])
            check_site(certificate, read_certificate(self._kit.authority), name)
            signer = certificate.public_key()
            assert isinstance(signer, ec.EllipticCurvePublicKey)
            signer.verify(signature, self._signed(rank, public), _WAY)
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except (ValueError, TypeError, KeyError, AssertionError, InvalidSignature) as error:
            raise ValueError(f"what came as the key of {name!r} is not its own") from error

    def _derived(self, shared: bytes, use: bytes) -> bytes:
        """Returns the key that sites derive from a secret for a use."""
        return derived(shared, self._about + use)

    def _signed(self, rank: int, public: bytes) -> bytes:
        return self._of(rank) + public

    def _of(self, rank: int) -> bytes:
        return self._about + struct.pack("!H", rank)

    @staticmethod
    def _nonce_of_key(rank: int) -> bytes:
        return struct.pack("!BBHQ", 0xFF, 0xFF, rank, 0)


def derived(secret: bytes, use: bytes) -> bytes:
    """Returns the key that is derived from a secret for a use."""
    return HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=use).derive(secret)


def _nonce(place: Place, recipient: int) -> bytes:
    """Returns the nonce of a message, which no other message under the same key has."""
    return _NONCE.pack(place.lane, place.kind, recipient, place.number)


def _text(of: bytes) -> str:
    return base64.b64encode(of).decode()
